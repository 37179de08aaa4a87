"""Liger's layers in an attached model: values and gradients of transformers' own layers.

Its Triton kernels run interpreted where there is no GPU. Under DDP its forward of the whole model runs too.
"""

import copy
import importlib

import numpy as np
import pytest
import torch
from support.models import logprobs_and_gradients, relative_difference, small_model, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach

liger = pytest.importorskip("liger_kernel.transformers", reason="Liger is not installed")
modeling = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        not hasattr(modeling, "Qwen2_5_VLCausalLMOutputWithPast"),
        reason="Liger 0.8.5 needs classes that transformers had up to 5.19",
    ),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl")


def packs(family):
    image = (1, 4, 4) if family == "internvl" else (1, 4, 6)
    prompt = [("text", range(5)), ("image", image, "x"), ("text", [7])]
    answers = [("response", [100 * n + i for i in range(n)]) for n in (3, 4, 6)]
    samples = with_pixels(
        [make_sample([*prompt, a], f"a{i}", family=family) for i, a in enumerate(answers)]
    )
    return {"shared": mp.pack(samples, share_prefix=True), "plain": mp.pack(samples)}


@pytest.fixture
def restored():
    """Liger sets names and classes of transformers' modules; what they were is put back."""
    names = ("internvl", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    modules = [importlib.import_module(f"transformers.models.{n}.modeling_{n}") for n in names]
    kept = [(m, dict(vars(m))) for m in modules]
    classes = {x for _, values in kept for x in values.values() if isinstance(x, type)}
    forwards = [(c, vars(c)["forward"]) for c in classes if "forward" in vars(c)]
    yield
    for module, values in kept:
        vars(module).clear()
        vars(module).update(values)
    for kind, forward in forwards:
        if vars(kind)["forward"] is not forward:
            kind.forward = forward


@pytest.fixture(autouse=True)
def numbers_as_compiled(monkeypatch):
    """Compiled kernels get a float as a scalar of float32, with `.to`; Triton's interpreter hands over Python's."""
    if DEVICE == "cuda":
        return
    from triton import language as tl
    from triton.runtime import interpreter

    own = interpreter._implicit_cvt

    def convert(arg):
        if not isinstance(arg, float):
            return own(arg)
        handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    for name in ("rms_norm", "layer_norm"):  # libdevice's is not a Python
        monkeypatch.setattr(
            importlib.import_module(f"liger_kernel.ops.{name}"), "rsqrt", lambda x: tl.rsqrt(x)
        )


def with_liger(model, family):
    getattr(liger, f"apply_liger_kernel_to_{family}")(model=model)
    return model


@pytest.mark.parametrize(
    ("family", "first"), [*((name, "liger") for name in FAMILIES), ("qwen2_5_vl", "attach")]
)
def test_it_agrees_with_transformers_layers(family, first, restored, no_tf32):
    own = small_model(family).to(DEVICE).train()
    model = copy.deepcopy(own)
    batches = {name: batch.to(DEVICE) for name, batch in packs(family).items()}
    with attach(own):
        expected = {name: logprobs_and_gradients(own, batch) for name, batch in batches.items()}
    if first == "liger":
        with_liger(model, family)
    with attach(model):
        if first == "attach":
            with_liger(model, family)
        found = {name: logprobs_and_gradients(model, batch) for name, batch in batches.items()}
    layer = model.get_decoder().layers[0]
    assert type(layer.input_layernorm)._get_name(layer.input_layernorm) != "LigerRMSNorm"
    assert "forward" in vars(layer.input_layernorm)  # Liger's
    for name, (values, gradients) in found.items():
        assert (values - expected[name][0]).abs().max() <= 1e-5, name
        assert relative_difference(gradients, expected[name][1]) <= 5e-6, name
