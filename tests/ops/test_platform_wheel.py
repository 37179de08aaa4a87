"""The library that a platform wheel brought: found before the cache's, refused by name where it does not fit."""

import pytest
import torch

from mmpack.errors import BackendError
from mmpack.losses.advantages.group import group_advantages
from mmpack.ops import build, native, recipe


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU of capability 9.0, torch for CUDA 13.0, an empty cache; a wheel for CUDA 13, sm_80 and sm_90."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    made = tmp_path / "built" / recipe.place(build.FOLDER, "13.0", ["sm_80", "sm_90"])
    made.parent.mkdir(parents=True)
    made.touch()
    build.library.cache_clear()
    yield made
    build.library.cache_clear()


def test_the_wheels_comes_first(machine):
    made = build.folder() / "sm_90" / recipe.LIBRARY
    made.parent.mkdir(parents=True)
    made.touch()
    assert build.library() == machine
    assert native.why_not() is None


def test_a_minor_version_of_cuda_may_differ(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert build.library() == machine


@pytest.mark.parametrize(
    ("cuda", "capability", "version", "why"),
    [
        ("12.8", (9, 0), "2.13.0", "the wheel's csrc/ is built for CUDA 13, torch has 12.8"),
        (None, (9, 0), "2.13.0", "the wheel's csrc/ is built for CUDA 13, torch has none"),
        ("13.0", (7, 5), "2.13.0", "the wheel's csrc/ is built for sm_80, sm_90, here is sm_75"),
        ("13.0", (10, 0), "2.13.0", "the wheel's csrc/ is built for sm_80, sm_90, here is sm_100"),
        ("13.0", (9, 0), "2.10.1+cu130", "csrc/ needs torch 2.11 or newer, this is 2.10"),
    ],
)
def test_what_does_not_fit_is_named(machine, monkeypatch, cuda, capability, version, why):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    build.library.cache_clear()
    assert build.library() is None
    found = native.why_not()
    assert found.startswith(why) and "\n" not in found
    assert "2.10" in why or found.endswith("(python -m mmpack.ops.build)")


def test_what_is_built_here_serves_where_the_wheels_does_not_fit(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (10, 0))
    made = build.folder() / "sm_100" / recipe.LIBRARY
    made.parent.mkdir(parents=True)
    made.touch()
    build.library.cache_clear()
    assert build.library() == made
    assert native.why_not() is None


def test_a_toolkit_of_another_cuda_is_refused(machine, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(recipe, "nvcc", lambda: machine)
    monkeypatch.setattr(recipe, "cxx", lambda: "c++")
    monkeypatch.setattr(recipe, "cuda_version", lambda compiler: "12.9")
    with pytest.raises(
        BackendError, match=r"nvcc is of CUDA 12.9, torch of CUDA 13.0. Fix: set CUDA_HOME"
    ):
        build.build()


@pytest.mark.gpu
def test_the_reason_reaches_who_forces_cuda(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("MMPACK_BACKEND", "cuda")
    build.library.cache_clear()
    with pytest.raises(
        BackendError, match=r"MMPACK_BACKEND is cuda, but the wheel's csrc/ is built"
    ):
        group_advantages(torch.zeros(2).cuda(), torch.zeros(2).long().cuda())
