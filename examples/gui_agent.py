"""An agent on a page in a real browser, top to bottom: from screenshots and clicks to `optimizer.step()`.

    python examples/gui_agent.py    # on a CPU, in about a minute. Needs mmpack[smoke] and chromium

The page is made here and shown by headless Chromium; each click is a click in its DOM. The policy is a script with
noise, so that some episodes succeed, some miss and some write a malformed action; the model that learns is tiny and
random. In your own loop, replace the browser, the policy and the model; the `mp.` calls stay the same.
"""

import functools
import random
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from urllib.parse import urlencode

import torch
from PIL import Image

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.demo import qwen_vl_processor, tiny_model
from mmpack.schema.actions import Click
from mmpack.trajectory import action_text, annotate_actions, check_actions, read_action

WIDTH, HEIGHT = 224, 168  # multiples of 28: Qwen2.5-VL's processor leaves the screenshot as it is
EPISODES, TURNS = 4, 2  # per task, which GRPO compares with each other; the maximum per episode

# 1. The page. Its state is in the URL. A click in the URL is made in the DOM, and the new state is written to the body.
PAGE = """<!doctype html><style>body {margin: 0; background: #eee; font: 14px sans-serif}
button {position: absolute; width: 64px; height: 32px}</style><body><script>
const query = new URLSearchParams(location.search), show = state => {
  document.body.dataset.state = state; document.body.innerHTML = "<p>" + state + "</p>";
  const button = (text, x, y, next) => { const b = document.createElement("button"); b.textContent = text;
    b.style.left = x + "px"; b.style.top = y + "px"; b.onclick = () => show(next); document.body.append(b); };
  if (state == "start") button("Menu", 16, 60, "menu");
  if (state == "menu") { button("Save", 20, 110, "saved"); button("Quit", 130, 110, "quit"); } };
show(query.get("state")); if (query.get("x")) {
  const hit = document.elementFromPoint(query.get("x"), query.get("y")); if (hit) hit.click(); }
</script>"""
TARGETS = {("start", goal): (48, 76) for goal in ("saved", "quit")}
TARGETS |= {("menu", "saved"): (52, 126), ("menu", "quit"): (162, 126)}
scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(scratch.name)
(folder / "page.html").write_text(PAGE, encoding="utf-8")
browser = shutil.which("chromium") or shutil.which("google-chrome")
if browser is None:
    raise SystemExit(
        "gui_agent: no chromium on the path. Fix: install it (Debian: apt install chromium)"
    )


def chromium(*options, **query):
    """Run the browser once on the page; what it prints. Its window is larger than the page, which it frames."""
    flags = f"--headless --no-sandbox --disable-gpu --window-size=800,600 --user-data-dir={folder}"
    url = f"{(folder / 'page.html').as_uri()}?{urlencode(query)}"
    command = [browser, *flags.split(), *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@functools.cache
def screenshot(state):
    chromium(f"--screenshot={folder}/{state}.png", state=state)
    return Image.open(folder / f"{state}.png").convert("RGB").crop((0, 0, WIDTH, HEIGHT))


@functools.cache
def clicked(state, x, y):
    return re.search(r'data-state="(\w+)"', chromium("--dump-dom", state=state, x=x, y=y))[1]


# 2. The policy: it knows where the buttons are, aims with noise, and sometimes stops before the end of a call.
rng = random.Random(0)


def answer(state, goal):
    x, y = (max(0, round(rng.gauss(centre, 12))) for centre in TARGETS.get((state, goal), (0, 0)))
    call = action_text(Click((x, y)), "computer_use")
    call = call[:-12] if rng.random() < 0.1 else call
    return f"<think>\nThe page is at {state}.\n</think>\n{call}<|im_end|>"


# 3. Episodes. Each turn's ids are kept as they were sampled; what the page shows after a click carries no loss.
#    `annotate_actions` says what the ids mean: actions, their points on the screenshot, and -1 for a malformed call.
hf_processor = qwen_vl_processor("qwen2_5_vl")
processor, tokenizer = mp.wrap_processor(hf_processor), hf_processor.tokenizer
#    Qwen2.5-VL points in pixels of the picture that it saw: `annotate_actions` knows this from the family.
paid = {"format": "computer_use", "scores": "rewards", "well_formed": 0.0, "malformed": -1.0}
annotate = functools.partial(annotate_actions, tokenizer=tokenizer, **paid)


def seen(state, text):
    image = {"type": "image", "image": screenshot(state)}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def episode(goal, name):
    state = "start"
    for turn in range(TURNS):
        ids = tokenizer.encode(answer(state, goal), add_special_tokens=False)
        if turn == 0:
            asked = seen(state, f"Click until the page says {goal}.")
            sample = processor(asked, ids, sample_id=name, group_id=goal, trajectory_id=name)
        else:
            shown = seen(state, "Go on.")
            sample = processor.append(sample, messages=shown, response_ids=ids, source="screenshot")
        sample, past = annotate(sample), len(sample.action_spans or ())
        for span in (sample.action_spans or ())[past:]:
            state = clicked(state, *map(round, read_action(span.action).point))
    sample.rewards.append(mp.Score("done", float(state == goal)))
    return sample


samples = [episode(goal, f"{goal}-{k}") for goal in ("saved", "quit") for k in range(EPISODES)]
assert mp.validate(samples) == [] and check_actions(samples, tokenizer, "computer_use") == []
done = sum(score.value for sample in samples for score in sample.rewards if score.name == "done")
spans = [span for sample in samples for span in sample.loss_spans]
kinds = Counter(span.kind for span in spans for _ in range(span.start, span.stop))
print(f"episodes: {len(samples)}, {done:.0f} done; loss tokens: {dict(kinds)}")

# 4. One GRPO step, packed: every prompt and every screenshot is computed once.
returns = torch.tensor([sum(score.value for score in sample.rewards) for sample in samples])
advantages = mp.group_advantages(returns, torch.arange(len(samples)) // EPISODES, kind="grpo")
plan = mp.plan(samples, max_tokens=1024, share_prefix=True)
totals = {"total_tokens": plan.total_tokens, "total_samples": plan.total_samples}
batches = [mp.pack([samples[i] for i in members], share_prefix=True) for members in plan.bins]
model, before, gain = tiny_model("qwen2_5_vl"), [], 0.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with attach(model):
    for members, batch in zip(plan.bins, batches, strict=True):
        logprobs = packed_logprobs(model, batch)
        mp.policy_loss(logprobs, advantages[members], batch.cu_loss, **totals).loss.backward()
        before.append(logprobs.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    # tokens of good episodes are now more likely: the sum of advantage times (ratio - 1) is above 0
    for members, batch, old in zip(plan.bins, batches, before, strict=True):
        with torch.no_grad():
            change = (packed_logprobs(model, batch) - old).exp() - 1
        for i, own in zip(members, batch.unpack_loss(change), strict=True):
            gain += (advantages[i] * own).sum().item() / plan.total_tokens
rows, tokens = sum(plan.bin_rows), sum(map(len, samples))
print(f"step: {rows} rows for {tokens} tokens, gradient norm {norm:.3f}, gain {gain:.1e} per token")
