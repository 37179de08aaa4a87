"""csrc/ where it can't be built or run: what is said, and by whom."""

import pytest
import torch
from support.process import run_python

from mmpack.errors import BackendError
from mmpack.losses.advantages import group_advantages


def test_a_missing_compiler_is_named():
    code = """
import runpy, torch
torch.version.cuda = None
runpy.run_module("mmpack.kernels.build", run_name="__main__")
"""
    result = run_python(code)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "csrc/ can't be built here, it lacks: a CUDA build of torch" in result.stderr


def test_cuda_forced_on_the_cpu(monkeypatch):
    monkeypatch.setenv("MMPACK_BACKEND", "cuda")
    with pytest.raises(BackendError, match=r"MMPACK_BACKEND is cuda, and csrc/ has no cpu code"):
        group_advantages(torch.zeros(2), torch.zeros(2).long())


@pytest.mark.gpu
def test_cuda_forced_and_not_built(monkeypatch, tmp_path):
    from mmpack.kernels import native

    monkeypatch.setenv("MMPACK_BACKEND", "cuda")
    monkeypatch.setattr(native, "why_not", native.why_not.__wrapped__)
    monkeypatch.setattr(native, "library", lambda: tmp_path / "mmpack_native.so")
    with pytest.raises(BackendError, match=r"is not built here \(python -m mmpack.kernels.build\)"):
        group_advantages(torch.zeros(2).cuda(), torch.zeros(2).long().cuda())
