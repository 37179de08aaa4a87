"""What `attach` imports so that the first step does not."""

import pytest
import torch
from support.models import smallest_qwen2_5_vl

from mmpack.adapters.transformers import attach, attention
from mmpack.errors import BackendError
from mmpack.ops.attention import choose

pytestmark = pytest.mark.adapter


@pytest.fixture
def loaded(monkeypatch):
    """Names of what is imported."""
    names = []
    monkeypatch.setattr(attention, "implementation", lambda op, device: names.append(op.name))
    monkeypatch.setattr(
        attention.first_use, "flash_attn_4_interface", lambda: names.append("flash_attn_4")
    )
    return names


def test_nothing_on_a_cpu(loaded):
    with attach(smallest_qwen2_5_vl()):
        assert loaded == []


@pytest.mark.parametrize("named", [None, "varlen", "flash_attn_4", "wrong"])
def test_kernels_of_a_gpu(loaded, named, monkeypatch):
    for variable in ("MMPACK_ATTENTION", "MMPACK_TOWER_ATTENTION"):
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, named)
    monkeypatch.setattr(choose.Chooser, "why_not", lambda *args: None)
    attention.load_kernels(torch.device("cuda"))
    assert loaded[:4] == [
        "merge_embeddings",
        "gather_rows",
        "linear_selected_logprobs",
        "support_logprobs",
    ]
    assert bool(loaded[4:]) == (named in (None, "flash_attn_4"))


def test_what_can_t_run_is_refused_where_it_runs(loaded, monkeypatch):
    def refused(op, device):
        raise BackendError("no")

    monkeypatch.setattr(attention, "implementation", refused)
    monkeypatch.setattr(choose.Chooser, "why_not", lambda *args: "not here")
    attention.load_kernels(torch.device("cuda"))
    assert loaded == []
