"""The probe on a GPU: layouts and dtypes are alike, a fault is named, TF32 is refused."""

import copy

import pytest
import torch
from support.families import mixed_batch
from support.models import small_model

import mmpack as mp
from mmpack.adapters.transformers.probe import probe_side

pytestmark = pytest.mark.gpu
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_are_alike(family, dtype, no_tf32):
    model, samples = small_model(family).to("cuda"), mixed_batch(family)
    packed = mp.probe.record(probe_side(model, dtype=dtype), samples)
    for layout in ("shared", "padded", "alone"):
        report = mp.probe.run(packed, probe_side(model, layout=layout, dtype=dtype), samples)
        assert report.ok, (layout, report.text())
        assert len(report.modules) > 60
        # Alone, a text's embeddings are the first layer's input as they are: nothing is merged into them.
        text_only = ["input_layernorm<in, sample 's4'"] if layout == "alone" else []
        assert len(report.notes) == len(text_only)
        assert all(part in note for part, note in zip(text_only, report.notes, strict=True))


def test_the_gpu_is_alike_the_cpu(no_tf32):
    model, samples = small_model("qwen2_5_vl"), mixed_batch("qwen2_5_vl")
    a = mp.probe.record(probe_side(model, "cpu"), samples)
    report = mp.probe.run(a, probe_side(copy.deepcopy(model).to("cuda"), "cuda"), samples)
    assert report.ok, report.text()


def test_a_rounded_weight_is_named(no_tf32):
    model, samples = small_model("qwen3_vl").to("cuda"), mixed_batch("qwen3_vl")
    broken = copy.deepcopy(model)
    weight = broken.model.language_model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data.bfloat16().float()
    report = mp.probe.run(probe_side(model), probe_side(broken, layout="padded"), samples)
    assert report.first.name == "model.language_model.layers.1.self_attn.v_proj<out", report.text()
    assert (report.first.sample, report.first.token) == ("s0", 0)


def test_tf32_is_refused_and_put_back(no_tf32):
    model, samples = small_model("qwen2_5_vl").to("cuda"), mixed_batch("qwen2_5_vl")[:1]
    torch.backends.cuda.matmul.allow_tf32 = True
    with pytest.raises(mp.ArgumentError, match="TF32"):
        mp.probe.record(probe_side(model), samples)
    mp.probe.record(probe_side(model, dtype=torch.bfloat16), samples)  # has no such products
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    mp.probe.record(probe_side(model), samples)
    assert torch.backends.cudnn.allow_tf32
