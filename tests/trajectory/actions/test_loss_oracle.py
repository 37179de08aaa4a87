"""Only what the model wrote carries loss, and of the right kind: against who wrote each character.

Conversations are built as text with a label for each character; the tokenizer's own offsets carry the labels over to
tokens. `.` nobody that learns (templates, users, tools, errors, pictures), `w` the policy, `r` its thoughts, `a` its
calls.
"""

import importlib.resources
import json
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import mmpack as mp
from mmpack.trajectory import find_actions, loss_kinds

pytest.importorskip("trl")
pytestmark = pytest.mark.adapter
KINDS = {"w": "response", "r": "reasoning", "a": "action", ".": ""}
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "computer_use", "arguments": %s}\n</tool_call>'
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), np.uint8))
LETTERS = st.sampled_from("ab 1.,:{}[]\"'\\\n\té深🙂<>/")
WORDS = st.text(LETTERS, max_size=12) | st.sampled_from(
    ["Thought: click", "Error 404", CALL % '{"action": "wait"}', "</tool_call>", " the", "\n\n"]
)
PLAIN = WORDS.filter(lambda text: "tool_call" not in text)


@pytest.fixture(scope="module")
def tokenizer():
    from mmpack.demo.vocabulary import qwen_tokenizer

    return qwen_tokenizer()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def processor(request, tokenizer):
    from mmpack.demo.qwen_processor import qwen_vl_processor

    folder = importlib.resources.files("trl") / "chat_templates"
    template = (folder / f"{request.param}.jinja").read_text(encoding="utf-8")
    hf = qwen_vl_processor(request.param, max_pixels=64 * 32 * 32, tokenizer=tokenizer)
    return mp.wrap_processor(hf, chat_template=template)


@st.composite
def answers(draw):
    """What the policy writes in a turn: text and labels, nothing that a header's line break would merge with."""
    parts = []
    if draw(st.booleans()):
        parts.append((f"<think>\n{draw(WORDS)}\n</think>", "r"))
    parts.append(("I" + draw(PLAIN), "w"))
    for text in draw(st.lists(PLAIN, max_size=2)):
        arguments = draw(
            st.just({"action": "left_click", "coordinate": [3, 40]})
            | PLAIN.map(lambda t: {"action": "type", "text": t})
            | st.just({"action": "fly"})  # malformed: the policy tried
        )
        parts += [(CALL % json.dumps(arguments, ensure_ascii=False), "a"), (text, "w")]
    parts.append((END, "w"))
    return [(text, label) for text, label in parts if text]


@st.composite
def conversations(draw):
    """Messages, and for each the text and labels that stand between the template's marks."""
    messages = [{"role": "system", "content": "Use the computer."}]
    first = draw(PLAIN)
    messages.append({"role": "user", "content": [{"type": "image", "image": IMAGE}, text(first)]})
    turns = draw(st.lists(st.tuples(answers(), st.booleans(), WORDS), min_size=1, max_size=3))
    for k, (parts, picture, observed) in enumerate(turns):
        written = "".join(part for part, _ in parts)[: -len(END)]
        messages.append({"role": "assistant", "content": written})
        if k + 1 < len(turns):
            shown = [{"type": "image", "image": IMAGE}] if picture else []
            role = draw(st.sampled_from(["tool", "user"]))
            messages.append({"role": role, "content": [text(observed), *shown]})
    return messages, [parts for parts, _, _ in turns]


def text(words):
    return {"type": "text", "text": words}


def labelled(processor, messages, turns):
    """The template's text, with a label for each of its characters."""
    whole = processor.render(messages, add_generation_prompt=False)
    labels, at = [], 0
    for parts in turns:
        written = "".join(part for part, _ in parts)
        start = whole.index("<|im_start|>assistant\n", at) + len("<|im_start|>assistant\n")
        assert whole.startswith(written, start)
        labels += ["."] * (start - at)
        for part, label in parts:
            labels += [label] * len(part)
        at = start + len(written)
    labels += ["."] * (len(whole) - at)
    return whole, labels


def owners(tokenizer, whole, labels):
    """Ids of the whole text, and of each the label: a call's if it has any character of one, and so on."""
    out = tokenizer(whole, return_offsets_mapping=True, add_special_tokens=False)
    found = []
    for start, stop in out["offset_mapping"]:
        inside = set(labels[start:stop])
        found.append(next(label for label in "arw." if label in inside))
    return out["input_ids"], found


def kinds(sample):
    """Ids and kind of each token, with one placeholder per medium; no kind where there is no loss."""
    said = np.full(len(sample), "", dtype=object)
    for span in sample.loss_spans:
        assert (said[span.start : span.stop] == "").all()
        said[span.start : span.stop] = span.kind
    keep = np.ones(len(sample), dtype=bool)
    for span in sample.modality_spans:
        keep[span.start + 1 : span.stop] = False
    return sample.input_ids[keep].tolist(), said[keep].tolist()


SETTINGS = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
@SETTINGS
@given(conversation=conversations())
def test_conversations_are_labelled_as_their_characters(processor, tokenizer, conversation):
    messages, turns = conversation
    whole, labels = labelled(processor, messages, turns)
    ids, found = owners(tokenizer, whole, labels)
    sample = processor(messages, assistant_loss=True, sample_id="s")
    cut = loss_kinds(sample, tokenizer)
    assert kinds(cut) == (ids, [KINDS[label] for label in found])
    assert np.array_equal(cut.loss_indices, sample.loss_indices)
    assert loss_kinds(cut, tokenizer).loss_spans == cut.loss_spans
    assert {s.turn for s in cut.loss_spans} == set(range(len(turns)))
    calls = sum(label == "a" for parts in turns for _, label in parts)
    actions = find_actions(cut, tokenizer)
    assert len(actions.scores) == calls == len(actions.spans) + len(actions.problems)
    assert mp.validate(cut) == []


@SETTINGS
@given(conversation=conversations(), data=st.data())
def test_ids_as_sampled_are_kept_and_labelled(processor, tokenizer, conversation, data):
    """A policy samples other ids than its text is encoded to: the spans are of those that it sampled."""
    messages, turns = conversation
    sampled, expected = [], []
    for parts in turns:
        written = "".join(part for part, _ in parts)
        labels = [label for part, label in parts for _ in part]
        places = st.integers(0, len(written) - len(END))
        cuts = sorted(data.draw(st.sets(places, max_size=4)) | {0, len(written)})
        ids, found = [], []
        for start, stop in pairwise(cuts):
            piece, said = owners(tokenizer, written[start:stop], labels[start:stop])
            ids, found = ids + piece, found + said
        sampled.append(ids)
        expected.append([KINDS[label] for label in found])
    asked = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    sample = processor(messages[: asked[0]], response_ids=sampled[0], sample_id="s")
    for ids, before, at in zip(sampled[1:], asked[:-1], asked[1:], strict=True):
        observed = messages[before + 1 : at]
        sample = processor.append(sample, messages=observed, response_ids=ids, source="environment")
    cut = loss_kinds(sample, tokenizer)
    _, said = kinds(cut)
    assert cut.input_ids[cut.loss_indices].tolist() == list(chain(*sampled))
    assert [kind for kind in said if kind] == list(chain(*expected))
    for span in cut.observation_spans or ():
        assert set(range(span.start, span.stop)).isdisjoint(cut.loss_indices.tolist())
    encoded = processor(messages, assistant_loss=True, sample_id="s")
    rendered = encoded.input_ids[: len(cut)]  # without the line break behind the last turn
    same = np.array_equal(rendered, cut.input_ids)
    report = mp.compare([cut], [encoded], require=("input_ids", "loss_spans"))
    assert same or report.first.field == "input_ids"
