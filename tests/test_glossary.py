"""The glossary defines each word of the field that the first pages use, and each word once."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_PAGES = ("README.md", "docs/start.md", "docs/concepts.md", "docs/faq.md", "docs/migrating.md")
# of RL, of language models and of mmpack; a stem stands for its forms
STEMS = """
adapter, advantage, bin, budget, chat template, clip, credit, dead letter, drift, engine,
episode, expanded, extra, family, forest, fused head, gradient accumulation, grid, GRPO,
group, hidden state, importance weight, kept ids, KL, layout, LoRA, logprob, loss row,
loss span, medium, micro-batch, min-p, mixture of experts, mRoPE, observation, off-policy,
on-policy, pack, parity, placeholder, plan, policy, prefix cache, probe, processor, prompt,
rank, ratio, replay, response, reward, rollout, router, routes, row, rule, sample, segment,
shared prefix, span, step, surrogate, teacher, temperature, top-k, top-p, tower, trace,
trainer, trajectory, turn, visible_until, vision token
"""


def defined() -> list[str]:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE)
    words = [word.strip("` ") for row in rows for word in row.split(",")]
    return [word for word in words if word not in ("word", "---")]


def test_words_of_the_first_pages_are_defined():
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in FIRST_PAGES)
    stems = " ".join(STEMS.split()).split(", ")
    used = {stem for stem in stems if re.search(rf"\b{re.escape(stem)}", text, re.IGNORECASE)}
    assert len(used) > 50
    known = {word.lower() for word in defined()}
    assert sorted(stem for stem in used if not any(stem.lower() in word for word in known)) == []


def test_no_word_is_defined_twice():
    words = defined()
    assert sorted(word for word in set(words) if words.count(word) > 1) == []
