"""What a first try gets wrong: samples where a batch belongs, a dtype for a device, lists of names, a URL, a path."""

import numpy as np
import pytest
import torch
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_listed_logprobs, packed_logprobs
from mmpack.demo import qwen_vl_processor, tiny_model
from mmpack.errors import ArgumentError, LayoutError, SchemaError
from mmpack.processors.images import path_below

REWARDS, GROUPS = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])


def said(call, *args, error=ArgumentError):
    with pytest.raises(error) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def samples():
    return [
        make_sample([("text", [1, 2, 3]), ("response", [7, 8])], f"s{k}", "g") for k in range(3)
    ]


def test_what_is_no_batch():
    model = tiny_model("qwen2_vl")
    with attach(model):
        for logprobs in (packed_logprobs, packed_listed_logprobs):
            assert "list is not a batch. Fix: pass what mp.pack" in said(logprobs, model, [1])


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_a_batch_moves_to_devices_only(samples, make):
    batch = make(samples)
    assert batch.to("cpu").num_loss_tokens == batch.to(torch.device("cpu")).num_loss_tokens == 6
    for device in (torch.bfloat16, None, ["cpu"]):
        assert "expected a device. Fix: pass 'cuda'" in said(batch.to, device)


def test_fixes_that_are_said_are_fixes(samples):
    names = ["a", "a", "b"]
    assert "number its texts" in said(mp.group_advantages, REWARDS, names)
    assert said(mp.group_advantages, REWARDS.long(), GROUPS).endswith("rewards.float()")
    assert said(mp.group_advantages, REWARDS, GROUPS.float()).endswith("group_index.long()")
    batch = mp.pack(samples)
    logprobs = torch.zeros(batch.num_loss_tokens)
    assert "batch.cu_loss" in said(mp.policy_loss, logprobs, REWARDS, batch)


def test_a_path_is_no_samples_and_a_url_no_path(tmp_path):
    [problem] = mp.validate("rollout.jsonl")
    assert (problem.code, problem.sample_id) == ("MM003", "samples")
    assert "mp.read_trace" in said(mp.check, "rollout.jsonl", error=SchemaError)
    for url, root in (("https://a/b.png", tmp_path), ("file:///a/b.png", None)):
        assert "is a URL, and mmpack fetches nothing" in said(path_below, url, root, "here")


def test_a_span_over_a_placeholder():
    processor = mp.wrap_processor(qwen_vl_processor("qwen2_vl", max_pixels=64 * 28 * 28))
    picture = np.zeros((56, 56, 3), np.uint8)
    start, pad, end = processor.tokenizer.convert_tokens_to_ids(
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    )

    def made(span):
        return processor.from_ids(
            [start, pad, end, 10],
            media=[picture],
            expanded=False,
            loss_spans=[span],
            sample_id="s",
        )

    assert "outside the loss spans" in said(made, (1, 4), error=LayoutError)
    assert made((3, 4)).num_loss_tokens == 1
