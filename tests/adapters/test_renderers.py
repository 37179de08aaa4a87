"""The package `renderers` beside transformers' processor: what its Qwen3-VL renderer returns, as samples and back."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import picture

import mmpack as mp
from mmpack.adapters.rendered import MediaStore
from mmpack.adapters.renderers import from_samples, to_samples
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError, LayoutError

pytestmark = pytest.mark.renderers

WORDS = ["<tool_response>", "</tool_response>", "<think>", "</think>"]  # of released vocabularies


@pytest.fixture(scope="module")
def hf():
    processor = qwen_vl_processor("qwen3_vl", min_pixels=32 * 32, max_pixels=16 * 32 * 32)
    processor.tokenizer.add_tokens(WORDS)
    return processor


@pytest.fixture(scope="module")
def processor(hf):
    return mp.wrap_processor(hf)


@pytest.fixture(scope="module")
def renderer(hf):
    from renderers.qwen3_vl import Qwen3VLRenderer

    return Qwen3VLRenderer(hf.tokenizer, processor=hf)


def turn(role, *parts):
    kinds = ["text" if isinstance(part, str) else "image" for part in parts]
    content = [{"type": k, k: part} for k, part in zip(kinds, parts, strict=True)]
    return {"role": role, "content": content}


def talk(*pictures, answer="It is green."):
    return [turn("user", *pictures, "What is this?"), {"role": "assistant", "content": answer}]


def test_a_rendered_conversation_is_the_sample_that_the_processor_makes(renderer, processor):
    pictures = [picture(1), picture(2, width=200), picture(1)]
    messages = [*talk(*pictures[:2]), *talk(pictures[2], answer="The first.")]
    [sample] = to_samples([renderer.render(messages)], processor, images=[pictures])
    assert mp.validate(sample) == []
    wanted = processor(messages, assistant_loss=True, sample_id="0/0", group_id="0")
    report = mp.compare([sample], [wanted])
    assert report.ok, report.lines()
    for mine, theirs in zip(sample.media, wanted.media, strict=True):
        assert mine.cache_key == theirs.cache_key
        assert np.array_equal(np.asarray(mine.pixel_values), np.asarray(theirs.pixel_values))


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=2), st.text("ab é\n", max_size=5)),
        min_size=1,
        max_size=3,
    )
)
def test_ids_masks_and_ranges_are_the_renderers(renderer, processor, turns):
    from renderers.base import build_training_sample

    messages = [
        m
        for seeds, text in turns
        for m in talk(*(picture(k, width=60 + 9 * k) for k in seeds), answer=text)
    ]
    made = build_training_sample(renderer, messages)
    store = MediaStore()
    for item in (made, renderer.render(messages)):
        [sample] = to_samples([item], processor, store=store)
        assert sample.input_ids.tolist() == made.token_ids
        assert sample.loss_indices.tolist() == np.flatnonzero(made.loss_mask).tolist()
        places = [(s.start, s.stop - s.start) for s in sample.modality_spans]
        sidecar = made.multi_modal_data
        ranges = sidecar.mm_placeholders["image"] if sidecar else []
        assert places == [(r.offset, r.length) for r in ranges]
        hashes = sidecar.mm_hashes["image"] if sidecar else []
        shown = [sample.media[s.media_index] for s in sample.modality_spans]
        assert [medium.metadata["vllm_hash"] for medium in shown] == hashes
    assert len(store) == len({k for seeds, _ in turns for k in seeds})


def test_a_prompt_goes_back_as_the_renderer_made_it(renderer, processor):
    made = renderer.render(talk(picture(1), picture(3))[:1], add_generation_prompt=True)
    store = MediaStore()
    [sample] = to_samples([made], processor, store=store)
    assert sample.num_loss_tokens == 0 and sample.media[0].pixel_values is None
    [back] = from_samples([sample], media=store)
    assert back["prompt_ids"] == made.token_ids
    mine, theirs = back["multi_modal_data"], made.multi_modal_data
    assert mine.mm_hashes == theirs.mm_hashes and mine.mm_placeholders == theirs.mm_placeholders
    for a, b in zip(mine.mm_items["image"], theirs.mm_items["image"], strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_picture_that_came_before_brings_no_pixels(renderer, processor):
    first, second = (renderer.render(talk(picture(1), answer=text)) for text in ("a", "b"))
    store = MediaStore()
    samples = to_samples([first], processor, store=store)
    second.multi_modal_data.mm_items["image"] = [None]
    samples += to_samples([second], processor, store=store, group_ids=["0"])
    samples[1].sample_id = "0/1"
    batch = mp.pack(samples, media=store, share_prefix=True)
    assert len(store) == len(batch.media) == 1
    pixels = first.multi_modal_data.mm_items["image"][0]["pixel_values"]
    assert torch.equal(batch.pixel_values, torch.as_tensor(pixels))
    with pytest.raises(ArgumentError, match="has no pixels, and its hash"):
        to_samples([second], processor)


class Client:
    """What `generate` asks of its client: answers one completion."""

    base_url = "http://engine/v1"
    ids = (9707, 0, 151645)

    async def get(self, *_, **__):
        raise RuntimeError("no such endpoint")

    async def post(self, *_, body, **__):
        logprobs = [{"token": f"token_id:{i}", "logprob": -0.5 - k} for k, i in enumerate(self.ids)]
        choice = {"token_ids": list(self.ids), "logprobs": {"content": logprobs}}
        choice |= {"finish_reason": "stop", "sampling_mask": [[9707, 12], [0], [11, 151645]]}
        answer = {"request_id": "r7", "choices": [choice]}
        return SimpleNamespace(content=json.dumps(answer).encode())


def test_what_generate_returned_is_a_sample_with_its_kept_ids(renderer, processor):
    """The dict of the package's own `generate`, for text: pictures would need vLLM."""
    from renderers.client import generate

    messages = [{"role": "user", "content": "Say hello."}]
    given = {"client": Client(), "renderer": renderer, "messages": messages, "model": "m"}
    generated = asyncio.run(generate(**given, max_prompt_len=99))
    sampling = {"temperature": 1.0, "top_k": 2, "logprobs": "processed"}
    [sample] = to_samples([generated], processor, sampling=sampling)
    assert mp.validate(sample) == [] and sample.sample_id == "r7/0"
    assert sample.input_ids.tolist() == generated["prompt_ids"] + generated["completion_ids"]
    assert sample.rollout_logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert [ids.tolist() for ids in sample.kept_ids.lists()] == [[12, 9707], [0], [11, 151645]]
    assert sample.finish_reason == "stop"
    assert sample.metadata["renderers"]["content"] == generated["content"]


def test_logprobs_that_a_step_fills_in_are_not_taken(renderer, processor):
    from renderers.base import build_trajectory_step

    messages = talk(picture(1))
    step = build_trajectory_step(renderer, messages[:1], messages[1:])
    [sample] = to_samples([step], processor)
    assert sample.rollout_logprobs is None
    assert sample.num_loss_tokens == len(step["completion_ids"])


def test_a_renderer_that_does_not_say_what_was_sampled_is_refused(hf, processor):
    from renderers import DefaultRendererConfig, create_renderer

    opaque = create_renderer(hf.tokenizer, DefaultRendererConfig())
    words = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if not hf.tokenizer.chat_template:
        hf.tokenizer.chat_template = hf.chat_template
    with pytest.raises(ArgumentError, match="has no sampled_mask"):
        to_samples([opaque.render(words)], processor)
    [prompt] = to_samples([opaque.render(words[:1])], processor)
    assert prompt.num_loss_tokens == 0


def test_the_page_s_example_runs(hf):
    page = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
    code = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    [block] = [block for block in code if "build_training_sample" in block]
    names = {"mp": mp, "hf_processor": hf, "messages": talk(picture(1))}
    exec(block, names)
    assert names["sample"].num_loss_tokens > 0
    assert names["prompt"]["multi_modal_data"].mm_hashes["image"]


@pytest.mark.parametrize(
    "change, error, why",
    [
        (lambda r: r.sampled_mask.pop(), ArgumentError, "sampled_mask is not a mask of"),
        (lambda r: setattr(r, "multi_modal_data", None), LayoutError, "a medium was dropped"),
        (lambda r: setattr(r, "multi_modal_data", {}), ArgumentError, "expected MultiModalData"),
    ],
)
def test_what_does_not_fit_is_refused(renderer, processor, change, error, why):
    made = renderer.render(talk(picture(1)))
    change(made)
    with pytest.raises(error, match=why):
        to_samples([made], processor)


@pytest.mark.parametrize("given", [None, "text", 3, [[1, 2]], [{"prompt_ids": [1]}], [None]])
def test_other_things_are_refused(processor, given):
    with pytest.raises(ArgumentError):
        to_samples(given, processor)
