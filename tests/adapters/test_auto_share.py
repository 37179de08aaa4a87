"""Packs of a plan with share_prefix="auto": some bins shared, some plain, logprobs as of each sample by itself."""

import pytest
import torch
from support.models import smallest_qwen2_5_vl, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs

pytestmark = pytest.mark.adapter


def test_logprobs_of_mixed_bins():
    long = [("text", range(60)), ("image", (1, 4, 6), "x"), ("text", [7])]
    samples = [
        make_sample([*long, ("response", range(k, k + 20))], f"l{k}", "long") for k in range(3)
    ]
    samples += [
        make_sample(
            [("text", [5]), ("response", range(100 * k, 100 * k + 126 - k))], f"t{k}", "tiny"
        )
        for k in range(2)
    ]
    with_pixels(samples)
    plan = mp.plan(samples, max_tokens=253, share_prefix="auto")
    assert sorted(plan.share) == [False, True]
    model = smallest_qwen2_5_vl()
    with torch.no_grad():
        expected = [packed_logprobs(model, mp.pad([s])) for s in samples]
        with attach(model):
            for members, share in zip(plan.bins, plan.share, strict=True):
                batch = mp.pack([samples[i] for i in members], share_prefix=share)
                found = batch.unpack_loss(packed_logprobs(model, batch))
                for i, values in zip(members, found, strict=True):
                    assert torch.allclose(values, expected[i], atol=1e-4, rtol=0)
