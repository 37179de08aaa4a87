"""What `attach` imports so that the first step does not."""

import pytest
import torch
from support.models import smallest_qwen2_5_vl

from mmpack.adapters.transformers import attach, attention
from mmpack.errors import BackendError
from mmpack.ops.attention import choose

pytestmark = pytest.mark.adapter
OPS = ["merge_embeddings", "gather_rows", "linear_selected_logprobs", "support_logprobs"]


@pytest.mark.parametrize("named", [None, "varlen", "flash_attn_4", "wrong"])
def test_kernels_are_loaded_for_a_gpu_where_they_run(named, monkeypatch):
    loaded = []
    monkeypatch.setattr(attention, "implementation", lambda op, device: loaded.append(op.name))
    monkeypatch.setattr(attention.first_use, "flash_attn_4_interface", lambda: loaded.append("4"))
    with attach(smallest_qwen2_5_vl()):
        assert loaded == []  # on a CPU
    for variable in ("MMPACK_ATTENTION", "MMPACK_TOWER_ATTENTION"):
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, named)
    monkeypatch.setattr(choose.Chooser, "why_not", lambda *args: None)
    attention.load_kernels(torch.device("cuda"))
    assert loaded[:4] == OPS and bool(loaded[4:]) == (named in (None, "flash_attn_4"))
    before = list(loaded)

    def refused(op, device):
        raise BackendError("no")

    monkeypatch.setattr(attention, "implementation", refused)
    monkeypatch.setattr(choose.Chooser, "why_not", lambda *args: "not here")
    attention.load_kernels(torch.device("cuda"))  # what can't run is refused where it runs
    assert loaded == before
