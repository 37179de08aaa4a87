"""A detached hybrid on a CPU whose transformers calls a package's kernels: one line, and attached it runs."""

import sys

import pytest
import torch
from support.models import small_model
from support.samples import make_sample
from transformers.integrations import hub_kernels

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.transformers.linear_attention import refuse_kernels_on_a_cpu

pytestmark = pytest.mark.adapter
wrapper = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)


@pytest.fixture(scope="module")
def model():
    return small_model("qwen3_5")


@pytest.fixture
def installed(model, tmp_path, monkeypatch):
    """transformers' own wrapper around the kernel of a package: one that takes no tensor here."""
    if wrapper is None:
        pytest.skip("transformers before 5.17 asks for a GPU by itself")
    (tmp_path / "fla.py").write_text(
        "def chunk_gated_delta_rule(*x, **y): raise RuntimeError('0 active drivers')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    name = "torch_chunk_gated_delta_rule"
    module = sys.modules[type(model.get_decoder().layers[0].linear_attn).__module__]
    function = getattr(module, name)
    wrapped = wrapper("chunk_gated_delta_rule", "fla")(function.__wrapped__)
    monkeypatch.setattr(module, name, wrapped)
    yield
    sys.modules.pop("fla", None)


def test_one_line_and_attached_it_runs(model, installed):
    batch = mp.pad([make_sample([("text", range(5)), ("response", [6, 7])], "a", family="qwen3_5")])
    with pytest.raises(
        mp.ModelError, match=r"on a CPU, where .* flash-linear-attention, .* Fix: attach\(model\)"
    ):
        packed_logprobs(model, batch)
    with pytest.raises(RuntimeError, match="0 active drivers"):  # what transformers says
        model(input_ids=batch.input_ids, use_cache=False)
    with attach(model), torch.no_grad():
        assert packed_logprobs(model, batch).isfinite().all()


def test_other_models_are_not_asked():
    refuse_kernels_on_a_cpu(small_model("qwen2_5_vl"), "model_inputs", "nothing")
