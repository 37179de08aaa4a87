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
