"""csrc/ compiled by its recipe, without a GPU or torch for CUDA; architectures as TORCH_CUDA_ARCH_LIST names them."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import _get_cuda_arch_flags

from mmpack.ops import recipe
from mmpack.ops.build import FOLDER

TORCH = Path(torch.__file__).parent


@pytest.mark.parametrize("named", ["8.0", "8.0;9.0", "8.0 9.0+PTX", "9.0a", "7.5;10.0+PTX"])
def test_architectures_are_those_of_torch(named, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    wanted = re.findall(r",code=(\w+)", " ".join(_get_cuda_arch_flags()))
    assert sorted(recipe.codes_of(named)) == sorted(wanted)


@pytest.mark.parametrize("named", ["Hopper", "9", "sm_80"])
def test_other_names_of_architectures(named):
    with pytest.raises(
        recipe.RecipeError, match=rf"has '{named}'. Fix: write capabilities as numbers"
    ):
        recipe.codes_of(named)


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe, "nvcc", lambda: None)
    with pytest.raises(recipe.RecipeError, match=r"it lacks: nvcc .*CUDA_HOME\), torch's headers$"):
        recipe.build(FOLDER, tmp_path, ["sm_90"], tmp_path / "made.so")


def test_cuda_home_comes_first(monkeypatch, tmp_path):
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert recipe.nvcc() == compiler
    assert recipe.cuda_version(compiler) == "12.9"


def test_what_the_compiler_says_is_one_line(monkeypatch, tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        "#!/bin/sh\necho 'a note\nx.cu(1): error: no such thing\nmore' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(recipe, "nvcc", lambda: compiler)
    wanted = r"^csrc/ can't be built here: nvcc says: x.cu\(1\): error: no such thing$"
    with pytest.raises(recipe.RecipeError, match=wanted):
        recipe.build(FOLDER, TORCH, ["sm_90"], tmp_path / "made.so")


def test_a_library_has_a_place_of_its_sources(tmp_path):
    for name in (*recipe.SOURCES, *recipe.HEADERS):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    place = recipe.place(tmp_path, "13.0", ["sm_80", "sm_90"])
    assert place == recipe.place(FOLDER, "13.2", ["sm_80", "sm_90"])
    assert place.parts[1:] == ("sm_80-sm_90", "mmpack_native.so")
    (tmp_path / "ops.h").write_text("// another\n")
    assert recipe.place(tmp_path, "13.0", ["sm_80", "sm_90"]) != place


@pytest.mark.slow
def test_the_library_asks_torch_for_its_stable_abi_only(tmp_path):
    compiler = recipe.nvcc()
    if compiler is None:
        pytest.skip("no nvcc")
    made = tmp_path / "bind.o"
    command = [compiler, *recipe.FLAGS, f"-I{TORCH / 'include'}", "-c", FOLDER / "bind.cpp", "-o"]
    subprocess.run([*command, made], check=True)
    asked = subprocess.run(["nm", made], capture_output=True, text=True, check=True).stdout
    undefined = re.findall(r" U ((?:aoti_|torch_|_ZNK?(?:3c10|2at|5torch))\w*)", asked)
    parts = ("stable", "inductor/aoti_torch")
    headers = [TORCH / f"include/torch/csrc/{part}/c/shim.h" for part in parts]
    shim = "".join(header.read_text() for header in headers)
    assert len(undefined) > 15
    assert [name for name in undefined if name not in shim] == []
