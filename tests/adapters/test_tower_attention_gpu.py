"""Vision towers on a GPU under each backend, against the same tower's own attention in fp32 on the CPU."""

import pytest
import torch
from support.models import relative_difference, small_model
from support.towers import CASES, encode, media_of, relative
from support.waits import never_waits

from mmpack.adapters.transformers import attach
from mmpack.adapters.transformers import tower_attention as adapter
from mmpack.ops.attention import SEQUENCES

pytestmark = pytest.mark.gpu
SOME = [c for c in CASES if c[1] in ("pictures that windows don't divide", "videos", "tiles")]


def on_gpu(media):
    return {name: x.cuda() for name, x in media.items()}


def on_cpu(gradients):
    return {name: x.cpu() for name, x in gradients.items()}


@pytest.mark.parametrize(("family", "grids"), SOME)
@pytest.mark.parametrize("backend", ["auto", *SEQUENCES.names])
def test_features_and_gradients_in_bf16(family, grids, backend, monkeypatch):
    """Heads of 16, as small models have them."""
    reason = SEQUENCES.explain(torch.device("cuda"), torch.bfloat16, 16).get(backend)
    if reason is not None:
        pytest.skip(reason)
    model, (modality, media) = small_model(family), media_of(family, grids)
    wanted, gradients = encode(model, modality, media)
    model = model.to("cuda", torch.bfloat16)
    own, own_gradients = encode(model, modality, on_gpu(media))
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", backend)
    with attach(model, text=False):
        found, others = encode(model, modality, on_gpu(media))
    for a, b, c in zip(found, own, wanted, strict=True):
        assert relative(a.cpu(), c) <= max(1.2 * relative(b.cpu(), c), 5e-3)
    assert others.keys() == own_gradients.keys()
    off, apart = (relative_difference(on_cpu(g), gradients) for g in (others, own_gradients))
    assert off <= max(1.2 * apart, 5e-3), (off, apart)


@pytest.mark.parametrize(("family", "grids"), SOME)
def test_features_and_gradients_in_float32(family, grids, no_tf32):
    model, (modality, media) = small_model(family), media_of(family, grids)
    wanted, gradients = encode(model, modality, media)
    model = model.cuda()
    with attach(model, text=False):
        found, others = encode(model, modality, on_gpu(media))
    assert max(relative(a.cpu(), c) for a, c in zip(found, wanted, strict=True)) <= 1e-4
    assert relative_difference(on_cpu(others), gradients) <= 1e-4


@pytest.mark.skipif(
    not adapter.TAKES_KNOWN, reason="this transformers' towers make all by themselves"
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_nothing_waits_for_the_gpu(family):
    """From the batch's grids to the features."""
    model = small_model(family).to("cuda", torch.bfloat16)
    _, media = media_of(family, "pictures that windows don't divide")
    media["pixel_values"] = media["pixel_values"].cuda()

    def run():
        arguments = adapter.on_their_device(model, media)
        return model.model.get_image_features(**arguments, return_dict=True).pooler_output

    with attach(model, text=False):
        never_waits(run)


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_after_detach_under_checkpointing(reentrant):
    modality, media = media_of("qwen2_5_vl", "pictures that windows don't divide")
    model = small_model("qwen2_5_vl").to("cuda", torch.bfloat16).train()
    media = on_gpu(media)
    with attach(model, text=False):
        _, expected = encode(model, modality, media)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    pixels = media["pixel_values"].to(torch.bfloat16).requires_grad_()
    with attach(model, text=False):
        out = model.model.get_image_features(pixels, media["image_grid_thw"], return_dict=True)
    features = torch.cat(tuple(out.pooler_output))
    torch.manual_seed(1)
    (features * torch.randn(features.shape).to(features)).sum().backward()
    assert relative(pixels.grad, expected["pixels"]) <= 1e-2
