"""Chat logs to trajectories: rendered where there is only text, and marked; ids of the log as they are."""

import base64
import copy
import io
import json
import types

import pytest

import mmpack as mp
from mmpack.trajectory import from_calls, from_chat, to_samples

pytestmark = pytest.mark.adapter
EOS = 151645


def url(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image(picture):
    return {"type": "image_url", "image_url": {"url": url(picture)}}


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture
def log(picture):
    """Three answers; a user and a tool reply with screenshots."""
    return [
        {"role": "system", "content": "Use the screen."},
        {"role": "user", "content": [image(picture(0)), text("Open mail.")]},
        {"role": "assistant", "content": "click(3, 4)"},
        {"role": "tool", "content": [image(picture(1, 84, 56)), text("clicked")]},
        {"role": "assistant", "content": "type('hi')"},
        {"role": "user", "content": [image(picture(2, 56, 56))]},
        {"role": "assistant", "content": "done"},
    ]


def read(log, processor, **options):
    return from_chat(log, processor, trajectory_id="e", group_id="g", **options)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_conversation_is_what_the_processor_renders(make_hf, log, family):
    """Oracle: transformers' own template and processor over the whole conversation."""
    hf = make_hf(family, 256 * 256)
    processor = mp.wrap_processor(hf)
    (sample,) = to_samples(read(log, processor))
    whole = processor(log, assistant_loss=True, sample_id="w", group_id="g")
    assert [s.turn for s in sample.loss_spans] == [0, 1, 2]
    length = len(sample)
    # without the line break behind the last end of turn
    assert sample.input_ids.tolist() == whole.input_ids[:length].tolist()
    assert sample.loss_indices.tolist() == whole.loss_indices.tolist()
    assert [m.cache_key for m in sample.media] == [m.cache_key for m in whole.media]
    assert [s.source for s in sample.observation_spans] == ["tool", "user"]
    plain = copy.deepcopy(log)
    for part in (p for m in plain if isinstance(m["content"], list) for p in m["content"]):
        if part.pop("image_url", None):
            part["type"] = "image"
    rendered = hf.tokenizer.apply_chat_template(
        plain, chat_template=hf.chat_template, tokenize=True, return_dict=False
    )
    pads = set(processor.family.placeholder_ids.values())
    ids = sample.input_ids.tolist()
    single = [i for k, i in enumerate(ids) if i not in pads or ids[k - 1] not in pads]
    assert single == list(rendered)[: len(single)] and len(rendered) - len(single) <= 1
    answers = [hf.tokenizer.decode(sample.input_ids[s.start : s.stop]) for s in sample.loss_spans]
    assert answers == ["click(3, 4)<|im_end|>", "type('hi')<|im_end|>", "done<|im_end|>"]
    assert mp.validate(sample) == [] and sample.rollout_logprobs is None
    assert sample.metadata["turns"]["1"] == {"reencoded": ["context", "response"]}


def test_sampled_ids_are_never_encoded_again(hf, processor, log):
    """Ids that the tokenizer would not give for their text stay as they are, in all later contexts too."""
    odd = [hf.tokenizer.encode(c)[0] for c in "click"] + [EOS]
    assert hf.tokenizer.encode(hf.tokenizer.decode(odd[:-1])) != odd[:-1]
    log[2] |= {"token_ids": odd, "logprobs": [-1.0] * len(odd), "finish_reason": "stop"}
    cut = odd[:-2]  # the engine stopped at its limit: the end of turn is context
    log[4] |= {
        "token_ids": cut,
        "logprobs": {"content": [{"token": "x", "logprob": -2.0} for _ in cut]},
        "finish_reason": "length",
    }
    trajectory = read(log, processor)
    assert [t.metadata["reencoded"] for t in trajectory.turns] == [
        ["context"],
        ["context"],
        ["context", "response"],
    ]
    (sample,) = to_samples(trajectory)
    one, two, _ = sample.loss_spans
    assert sample.input_ids[one.start : one.stop].tolist() == odd
    assert sample.input_ids[two.start : two.stop].tolist() == cut
    assert sample.input_ids[two.stop] == EOS and sample.input_ids[one.stop] != EOS
    assert trajectory.turns[0].logprobs.tolist() == [-1.0] * len(odd)
    assert trajectory.turns[1].logprobs.tolist() == [-2.0] * len(cut)
    assert [t.finish_reason for t in trajectory.turns] == ["stop", "length", None]
    assert mp.validate(to_samples(trajectory, merge=False)) == []


def test_tool_calls_are_written_by_the_template(processor, make_hf, picture):
    """OpenAI's arguments are text, templates write objects as JSON."""
    call = {"id": "1", "type": "function", "function": {"name": "zoom", "arguments": '{"x": 3}'}}
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    wrapped = mp.wrap_processor(make_hf(), chat_template=template)
    log = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
        {"role": "assistant", "content": "Done."},
    ]
    (sample,) = to_samples(read(log, wrapped))
    first = sample.loss_spans[0]
    said = wrapped.tokenizer.decode(sample.input_ids[first.start : first.stop])
    assert json.loads(said.removesuffix("<|im_end|>")) == {"name": "zoom", "arguments": {"x": 3}}


def engine(processor, messages, answer, tokens="token_ids"):
    """A call and its response as vLLM's chat endpoint returns them with token ids."""
    context = processor(messages, sample_id="c").input_ids.tolist()
    choice = {"index": 0, "message": {"role": "assistant", "content": "…"}, "finish_reason": "stop"}
    logprobs = [{"token": f"token_id:{i}", "logprob": -0.25} for i in answer]
    if tokens == "token_ids":
        choice["token_ids"] = answer
    return {
        "request": {"messages": messages},
        "response": {
            "prompt_token_ids": context,
            "choices": [{**choice, "logprobs": {"content": logprobs}}],
        },
    }


@pytest.mark.parametrize("tokens", ["token_ids", "logprobs"])
def test_calls_with_ids_are_read_as_they_are(processor, log, tokens):
    calls = [engine(processor, log[:2], [5, 6, EOS], tokens)]
    second = engine(processor, log[:2], [7, EOS], tokens)
    grown = to_samples(from_calls(calls, processor, trajectory_id="e", group_id="g"))[0]
    grown = processor.append(grown, messages=log[3:4])
    second["request"]["messages"] = log[:4]
    second["response"]["prompt_token_ids"] = grown.input_ids.tolist()
    window = engine(processor, [log[0], log[5]], [8, EOS], tokens)
    calls += [second, types.SimpleNamespace(model_dump=lambda: window)]
    trajectory = from_calls(calls, processor, trajectory_id="e", group_id="g")
    samples = to_samples(trajectory)
    assert [s.sample_id for s in samples] == ["e/0", "e/2"]
    assert [s.num_loss_tokens for s in samples] == [5, 2]
    assert samples[0].input_ids.tolist() == [*grown.input_ids.tolist(), 7, EOS]
    assert samples[0].rollout_logprobs.tolist() == [-0.25] * 5
    assert all(t.metadata == {} for t in trajectory.turns)
    assert mp.validate(samples) == [] and samples[0].finish_reason == "stop"


def test_calls_with_text_alone_are_new_prompts(processor, log):
    calls = [
        {"messages": log[:2], "choices": [{"message": log[2], "finish_reason": "tool_calls"}]},
        {"messages": log[:4], "choices": [{"message": log[4], "finish_reason": "stop"}]},
    ]
    trajectory = from_calls(calls, processor, trajectory_id="e", group_id="g")
    assert [t.metadata["reencoded"] for t in trajectory.turns] == [["context", "response"]] * 2
    assert [t.finish_reason for t in trajectory.turns] == ["tool", "stop"]
    (sample,) = to_samples(trajectory)  # this template goes on as the answers were written
    whole = processor(log[:5], assistant_loss=True, sample_id="w")
    assert sample.input_ids.tolist() == whole.input_ids[: len(sample)].tolist()
    # ids as sampled and a context that was rendered again differ: two samples
    calls[0]["choices"][0]["token_ids"] = [5, EOS]
    samples = to_samples(from_calls(calls, processor, trajectory_id="e", group_id="g"))
    assert samples[0].num_loss_tokens == 2 and len(samples) == 2
