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


def said(call, error=ArgumentError):
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def samples():
    return [
        make_sample([("text", [1, 2, 3]), ("response", [7, 8])], f"s{k}", "g") for k in range(3)
    ]


@pytest.mark.parametrize("logprobs", [packed_logprobs, packed_listed_logprobs])
@pytest.mark.parametrize("given", [None, [1], {"input_ids": [1]}])
def test_logprobs_of_what_is_no_batch(logprobs, given):
    model = tiny_model("qwen2_vl")
    with attach(model):
        assert "is not a batch. Fix: pass what mp.pack returned" in said(
            lambda: logprobs(model, given)
        )


@pytest.mark.parametrize("device", [torch.bfloat16, None, ["cpu"]])
@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_a_batch_moves_to_devices_only(samples, make, device):
    batch = make(samples)
    assert batch.to("cpu").num_loss_tokens == batch.to(torch.device("cpu")).num_loss_tokens == 6
    assert "expected a device. Fix: pass 'cuda'" in said(lambda: batch.to(device))


def test_fixes_that_are_said_are_fixes(samples):
    names = ["a", "a", "b"]
    assert "number its texts" in said(lambda: mp.group_advantages(REWARDS, names))
    assert said(lambda: mp.group_advantages(REWARDS.long(), GROUPS)).endswith("rewards.float()")
    assert said(lambda: mp.group_advantages(REWARDS.bool(), GROUPS)).endswith("rewards.float()")
    assert said(lambda: mp.group_advantages(REWARDS, GROUPS.float())).endswith("group_index.long()")
    fixed = mp.group_advantages(REWARDS.long().float(), GROUPS.float().long())
    assert fixed.tolist() == mp.group_advantages(REWARDS, GROUPS).tolist()
    batch = mp.pack(samples)
    logprobs = torch.zeros(batch.num_loss_tokens)
    assert "batch.cu_loss" in said(lambda: mp.policy_loss(logprobs, REWARDS, batch))
    mp.policy_loss(logprobs, REWARDS, batch.cu_loss)


@pytest.mark.parametrize("path", ["rollout.jsonl", "", b"rollout.jsonl"])
def test_a_path_is_no_samples(path):
    [problem] = mp.validate(path)
    assert (problem.code, problem.sample_id) == ("MM003", "samples")
    assert "mp.read_trace" in said(lambda: mp.check(path), SchemaError)


@pytest.mark.parametrize("rooted", [True, False])
@pytest.mark.parametrize("url", ["https://a/b.png", "file:///a/b.png", "s3://a/b.png"])
def test_a_url_is_not_called_a_path(url, rooted, tmp_path):
    root = tmp_path if rooted else None
    assert "is a URL, and mmpack fetches nothing" in said(lambda: path_below(url, root, "here"))


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

    assert "outside the loss spans" in said(lambda: made((1, 4)), LayoutError)
    assert made((3, 4)).num_loss_tokens == 1
