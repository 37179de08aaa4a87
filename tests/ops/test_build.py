"""csrc/ where it can't be built or run: what is said, and by whom."""

import pytest
import torch
from support.process import run_python

from mmpack.errors import BackendError
from mmpack.losses.advantages.group import group_advantages
from mmpack.ops import build, native


def test_a_missing_compiler_is_named():
    code = """
import runpy, torch
torch.version.cuda = None
runpy.run_module("mmpack.ops.build", run_name="__main__")
"""
    result = run_python(code)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "csrc/ can't be built here, it lacks: a CUDA build of torch" in result.stderr


def test_cuda_forced_on_the_cpu(monkeypatch):
    monkeypatch.setenv("MMPACK_BACKEND", "cuda")
    with pytest.raises(BackendError, match=r"MMPACK_BACKEND is cuda, but csrc/ has no cpu code"):
        group_advantages(torch.zeros(2), torch.zeros(2).long())


@pytest.mark.gpu
def test_cuda_forced_and_not_built(monkeypatch):
    monkeypatch.setenv("MMPACK_BACKEND", "cuda")
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(
        BackendError, match=r"is not built for the GPUs here \(python -m mmpack.ops.build\)"
    ):
        group_advantages(torch.zeros(2).cuda(), torch.zeros(2).long().cuda())


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of libraries, on a machine with a GPU of capability 9.0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    build.library.cache_clear()
    yield build.folder()
    build.library.cache_clear()


@pytest.mark.parametrize("codes", ["sm_80-sm_90", "sm_90a", "sm_80-compute_80", "compute_75"])
def test_a_library_for_several_gpus_is_found(cache, codes):
    assert build.library() is None
    assert native.why_not() is not None
    made = cache / codes / "mmpack_native.so"
    made.parent.mkdir(parents=True)
    made.touch()
    build.library.cache_clear()  # as build() does
    assert build.library() == made
    assert native.why_not() is None


@pytest.mark.parametrize("codes", ["sm_80", "sm_100", "compute_100", "sm_80-compute_100a"])
def test_a_library_for_other_gpus_is_not(cache, codes):
    made = cache / codes / "mmpack_native.so"
    made.parent.mkdir(parents=True)
    made.touch()
    assert build.library() is None
