"""`python -m mmpack.ops.build`: compile csrc/ for the GPUs of this machine, once, into the cache.

A command, and not what the first op that runs does: a compiler must not run in the middle of a training step.
A platform wheel brings the library (`hatch_build.py`), and then there is nothing to compile.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from pathlib import Path

from mmpack.errors import BackendError, MissingExtraError, require
from mmpack.files import replaced
from mmpack.ops import recipe
from mmpack.ops.first_use import cache_folder

FOLDER = Path(__file__).resolve().parents[1] / "_csrc"
BUILT = FOLDER / "built"  # in a platform wheel
ELSE = "or leave MMPACK_BACKEND=auto, which goes without csrc/"


@functools.cache
def library() -> Path | None:
    """The library of these sources for torch's CUDA and, among others, the GPUs here: the wheel's, else the cache's."""
    if _torch() < recipe.TORCH:
        return None
    for folder in (BUILT, cache_folder()):
        for path in _of(folder, recipe.family(FOLDER, _cuda())):
            if all(_runs(path.parent.name, capability) for capability in _present()):
                return path
    return None


def why_no_library() -> str:
    """Why `library()` is None, for a message: what a platform wheel brought, and what is here."""
    if _torch() < recipe.TORCH:
        return "csrc/ needs torch {}.{} or newer, this is {}.{}".format(*recipe.TORCH, *_torch())
    fix = "(python -m mmpack.ops.build)"
    for path in _of(BUILT, "cuda*"):
        cuda = path.parents[1].name.partition("-")[0].removeprefix("cuda")
        if cuda != _cuda().partition(".")[0]:
            return (
                f"the wheel's csrc/ is built for CUDA {cuda}, torch has {_cuda() or 'none'} {fix}"
            )
        codes = path.parent.name.replace("-", ", ")
        here = ", ".join(sorted({"sm_{}{}".format(*capability) for capability in _present()}))
        return f"the wheel's csrc/ is built for {codes}, here is {here} {fix}"
    return f"csrc/ is not built for the GPUs here {fix}"


def build() -> Path:
    """Compile csrc/ into the cache; returns the library. Raises BackendError where something is missing for that."""
    import torch

    needs = {
        "a CUDA build of torch": torch.version.cuda is not None,
        "a GPU, or TORCH_CUDA_ARCH_LIST": bool(_architectures()),
        # Of a torch without CUDA it does not matter.
        "nvcc (the CUDA toolkit; CUDA_HOME)": torch.version.cuda is None
        or recipe.nvcc() is not None,
        "a C++ compiler": recipe.cxx() is not None,
    }
    missing = [name for name, there in needs.items() if not there]
    if missing:
        raise BackendError(
            f"csrc/ can't be built here, it lacks: {', '.join(missing)}. Fix: install that, {ELSE}"
        )
    try:
        codes = recipe.codes_of(_architectures())
        compiler = recipe.cuda_version(recipe.nvcc() or Path())
        if compiler.partition(".")[0] != _cuda().partition(".")[0]:
            raise BackendError(
                f"csrc/ can't be built here: nvcc is of CUDA {compiler}, torch of CUDA {_cuda()}. "
                f"Fix: set CUDA_HOME to a toolkit of CUDA {_cuda()}, {ELSE}"
            )
        target = cache_folder() / recipe.place(FOLDER, _cuda(), codes)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made = Path(work) / target.name
            recipe.build(FOLDER, Path(torch.__file__).parent, codes, made)
            with replaced(target, "mmpack.ops.build", BackendError) as file:
                file.write(made.read_bytes())
    except recipe.RecipeError as error:
        raise BackendError(f"{error}. Fix: mend that, {ELSE}") from None
    library.cache_clear()
    torch.ops.load_library(str(target))
    return target


def folder() -> Path:
    """Where libraries of these sources and this CUDA are, in a folder named after what they are compiled for."""
    return cache_folder() / recipe.family(FOLDER, _cuda())


def _of(folder: Path, family: str) -> list[Path]:
    return sorted(folder.glob(f"{family}/*/{recipe.LIBRARY}"))


def _torch() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _cuda() -> str:
    """Of torch, as "13.0"; "" where it has none."""
    import torch

    return torch.version.cuda or ""


def _present() -> set[tuple[int, int]]:
    """The compute capabilities of the GPUs here."""
    import torch

    return {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}


def _runs(codes: str, capability: tuple[int, int]) -> bool:
    """Whether code for "sm_80-sm_90a-compute_90" runs on a GPU: machine code of its family, or PTX of an older one."""
    for kind, digits, only in re.findall(r"(sm|compute)_(\d+)([af]?)", codes):
        code = int(digits[:-1]), int(digits[-1])
        if only and code != capability:
            continue
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


def _architectures() -> str:
    """As TORCH_CUDA_ARCH_LIST writes them, "8.0;9.0"."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    return named or ";".join(f"{major}.{minor}" for major, minor in sorted(_present()))


def main() -> int:
    try:
        require("torch", "torch", "mmpack.ops.build")
        print(build())
    except (BackendError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
