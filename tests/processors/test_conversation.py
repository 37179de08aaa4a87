"""Loss spans of whole conversations, and turns appended as messages, by released templates.

Oracles: the mask of transformers' `return_assistant_tokens_mask` with TRL's versions of the same templates, which have
{% generation %} marks; and the characters between a turn's header and its end.
"""

import importlib.resources

import numpy as np
import pytest

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.schema.spans import ObservationSpan

pytestmark = pytest.mark.adapter
EOS, LINE = 151645, 198
LOOK = {"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2, 3, 4]}}}
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}]


def text(words):
    return {"type": "text", "text": words}


def template(name):
    pytest.importorskip("trl")
    path = importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def conversation(picture, tool="tool", calls=True):
    """Three assistant turns, a tool that answers with pictures and text, two user turns."""
    image = {"type": "image"}
    called = {"tool_calls": [LOOK]} if calls else {}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image | {"image": picture(0)}, text("What is it?")]},
        {"role": "assistant", "content": "Let me look.", **called},
        {"role": tool, "content": [text("Zoomed:"), image | {"image": picture(1, 200, 150)}]},
        {"role": tool, "content": [image | {"image": picture(0)}]},
        {"role": "assistant", "content": [text("A "), text("square.")]},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.\n"},
    ]


def marked(hf, messages, name, **options):
    """HF's ids and mask, placeholders single, by TRL's template; the line break behind an end of turn is not ours."""
    out = hf.tokenizer.apply_chat_template(
        messages,
        chat_template=template(f"{name}_training"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **options,
    )
    ids, mask = np.asarray(out["input_ids"]), np.asarray(out["assistant_masks"], dtype=bool)
    behind = np.concatenate([[False], ids[:-1] == EOS]) & (ids == LINE)
    return ids, mask & ~behind


def single(sample):
    """Ids and loss mask with one placeholder per medium."""
    mask = np.zeros(len(sample), dtype=bool)
    mask[sample.loss_indices] = True
    keep = np.ones(len(sample), dtype=bool)
    for s in sample.modality_spans:
        keep[s.start + 1 : s.stop] = False
    return sample.input_ids[keep], mask[keep]


@pytest.mark.parametrize(
    ("family", "name", "tool"),
    [
        ("qwen2_vl", "qwen2_5_vl", "user"),  # byte-identical templates, says TRL
        ("qwen3_vl", "qwen3_vl", "tool"),
    ],
)
def test_turns_are_transformers_mask(make_hf, picture, family, name, tool):
    hf = make_hf(family, max_pixels=256 * 32 * 32)
    messages = conversation(picture, tool, calls=name == "qwen3_vl")  # the other has none
    options = {"tools": TOOLS} if name == "qwen3_vl" else {}
    processor = mp.wrap_processor(hf, chat_template=template(name))
    sample = processor(
        messages, assistant_loss=True, sample_id="s", group_id="g", template_kwargs=options
    )
    ids, mask = marked(hf, messages, name, **options)
    found, loss = single(sample)
    assert np.array_equal(found, ids) and np.array_equal(loss, mask)
    assert [s.turn for s in sample.loss_spans] == [0, 1, 2] and len(sample.media) == 2
    turns = [hf.tokenizer.decode(sample.input_ids[s.start : s.stop]) for s in sample.loss_spans]
    assert turns[0].startswith("Let me look.") and turns[0].endswith("<|im_end|>")
    assert turns[1:] == ["A square.<|im_end|>", "Yes.\n<|im_end|>"]
    a, b, c = sample.loss_spans
    source = "user" if tool == "user" else "tool"
    assert sample.observation_spans == [
        ObservationSpan(a.stop, b.start, source, 1),
        ObservationSpan(b.stop, c.start, "user", 2),
    ]
    assert mp.validate(sample) == []


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_turns_appended_are_the_conversation(make_hf, picture, name):
    hf = make_hf(name, max_pixels=256 * 32 * 32)
    processor = mp.wrap_processor(hf, chat_template=template(name))
    messages = conversation(picture, calls=name == "qwen3_vl")
    whole = processor(messages, assistant_loss=True, sample_id="s")
    answers = [whole.input_ids[s.start : s.stop] for s in whole.loss_spans]
    sample = processor(messages[:2], response_ids=answers[0], sample_id="s")
    sample = processor.append(sample, messages=messages[3:5], response_ids=answers[1])
    sample = processor.append(sample, messages=messages[6:7])
    sample = processor.append(sample, response_ids=answers[2])
    assert whole.input_ids[-1] == LINE  # which the template writes, and no engine
    assert np.array_equal(sample.input_ids, whole.input_ids[:-1])
    assert sample.loss_spans == whole.loss_spans
    assert sample.observation_spans == whole.observation_spans
    assert sample.media_cache_keys == whole.media_cache_keys
    assert np.array_equal(sample.position_ids, whole.position_ids[:, :-1])
    more = {"messages": messages[6:7], "response_ids": [1]}
    one, two = processor.append(sample, **more), processor.append(whole, **more)
    assert np.array_equal(one.input_ids, two.input_ids)  # the line break once, whoever wrote it


def test_an_answer_that_was_cut_off_is_ended(processor):
    asked = [{"role": "user", "content": "x"}]
    cut, whole = (processor(asked, response_ids=r, sample_id="s") for r in ([40], [40, EOS]))
    more = [processor.append(s, messages=asked, response_ids=[41, EOS]) for s in (cut, whole)]
    assert np.array_equal(more[0].input_ids, more[1].input_ids)
    first = more[0].loss_spans[0]
    assert (first.stop - first.start, more[0].input_ids[first.stop]) == (1, EOS)


def test_pictures_are_counted_on(make_hf, picture):
    hf = make_hf("qwen3_vl", max_pixels=256 * 32 * 32)
    processor = mp.wrap_processor(hf, chat_template=template("qwen3_vl"))
    messages = conversation(picture)
    count = {"template_kwargs": {"add_vision_id": True}}
    sample = processor(messages[:2], response_ids=[40, EOS], sample_id="s", **count)
    sample = processor.append(sample, messages=messages[3:5], **count)
    written = processor.tokenizer.decode(sample.input_ids)
    assert [f"Picture {k}: " in written for k in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_response_after_the_turns(processor):
    messages = [
        {"role": r, "content": c} for r, c in (("user", "x"), ("assistant", "y"), ("user", "z"))
    ]
    sample = processor(messages, response_ids=[40, EOS], assistant_loss=True, sample_id="s")
    assert [s.turn for s in sample.loss_spans] == [0, 1]
    assert sample.input_ids[sample.loss_indices].tolist()[-2:] == [40, EOS]
    first, last = sample.loss_spans
    assert sample.observation_spans == [ObservationSpan(first.stop, last.start, "user", 1)]
    plain = processor(messages, response_ids=[40, EOS], sample_id="s")
    assert np.array_equal(plain.input_ids, sample.input_ids) and len(plain.loss_spans) == 1


def test_a_turn_begins_with_its_own_token(processor):
    """A line break that the policy wrote is not merged into the one of the header."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n\nyes"}]
    sample = processor(messages, assistant_loss=True, sample_id="s")
    (span,) = sample.loss_spans
    assert (
        processor.tokenizer.decode(sample.input_ids[span.start : span.stop]) == "\n\nyes<|im_end|>"
    )
    prompted = processor(messages[:1], response_ids=sample.input_ids[span.start :], sample_id="s")
    assert np.array_equal(prompted.input_ids, sample.input_ids)


THINKING = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ny"},
    {"role": "user", "content": "z"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nw"},
]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_a_template_that_strips_thinking_is_refused(hf, name):
    processor = mp.wrap_processor(hf, chat_template=template(name))
    with pytest.raises(ArgumentError, match=r"messages\[1\] differently.*append") as caught:
        processor(THINKING, assistant_loss=True, sample_id="s")
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)
    sample = processor(THINKING[:2], assistant_loss=True, sample_id="s")
    written = processor.tokenizer.decode(sample.input_ids[sample.loss_indices])
    assert written.endswith("hm\n</think>\n\ny<|im_end|>")
    more = processor.append(sample, messages=THINKING[2:3], response_ids=[40])  # as it was sampled
    assert "hm\n</think>" in processor.tokenizer.decode(more.input_ids)


def test_refusals(processor, picture):
    image = [{"type": "image", "image": picture(0)}]
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    for messages, match in (
        ([user], "no message is an assistant's"),
        ([assistant, user], r"messages\[0\] is an assistant's turn"),
        ([user, assistant | {"content": image}], "turn 0 holds a picture"),
    ):
        with pytest.raises(ArgumentError, match=match):
            processor(messages, assistant_loss=True, sample_id="s")
    prompt = processor([user], sample_id="s")
    answered = processor([user], response_ids=[1], sample_id="s")
    for sample, more, match in (
        (prompt, {"messages": [user]}, "ends in a prompt"),
        (answered, {"messages": [assistant]}, "response_ids"),
        (answered, {"messages": [user], "observation_ids": [1]}, "say the same thing"),
        (answered, {"messages": [user], "media": [picture(0)]}, "1 of media="),
        (answered, {"messages": [user], "source": "web"}, "source 'web'"),
    ):
        with pytest.raises(ArgumentError, match=match):
            processor.append(sample, **more)
