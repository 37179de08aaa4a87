"""What sliding windows and two-way pictures rule out, in one line each; and the same bits where samples are short."""

import pytest
import torch
from support.kits import get_kit
from support.kits.samples import mixed_samples
from support.models import small_model

import mmpack as mp
from mmpack import invariant
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.transformers.prefix import kv_bytes_per_token


@pytest.fixture(scope="module")
def model():
    return small_model("gemma3")


@pytest.fixture(scope="module")
def samples():
    return mixed_samples(get_kit("gemma3"))


def test_a_cached_prefix(model):
    with pytest.raises(
        mp.ModelError, match=r"the model has sliding windows, pictures that see both ways. Fix: use"
    ):
        kv_bytes_per_token(model)


def test_windows_in_the_mode_of_equal_bits(model, samples):
    with (
        attach(model),
        invariant.batch_invariant(model),
        pytest.raises(
            mp.BackendError,
            match=r"batch_invariant runs fixed_blocks alone, .* no sliding window.* Fix: leave batch_invariant",
        ),
    ):
        packed_logprobs(model, mp.pack(samples))


def test_samples_within_the_window_have_equal_bits():
    kit = get_kit("gemma3")
    model, samples = kit.small(), mixed_samples(kit)
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 4096
    model.config.get_text_config().sliding_window = 4096
    with attach(model), invariant.batch_invariant(model), torch.no_grad():
        alone = torch.cat([packed_logprobs(model, mp.pack([s])) for s in samples])
        assert torch.equal(packed_logprobs(model, mp.pack(samples, share_prefix=True)), alone)
