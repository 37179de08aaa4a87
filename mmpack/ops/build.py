"""`python -m mmpack.ops.build`: compile csrc/ for the GPUs of this machine, once, into the cache.

A command, and not what the first op that runs does: a compiler must not run in the middle of a training step.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from mmpack.errors import BackendError, MissingExtraError, require
from mmpack.files import replaced
from mmpack.ops.first_use import cache_folder

NAME = "mmpack_native"
FOLDER = Path(__file__).resolve().parents[1] / "_csrc"
SOURCES = (
    "bind.cpp",
    "gather_rows.cu",
    "pack_video.cu",
    "policy_loss.cu",
    "rewards.cu",
    "tickets.cu",
)
HEADERS = ("ops.h", "portable.h")
# The stable ABI that torch has since 2.11.
FLAGS = ["-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]


@functools.cache
def library() -> Path | None:
    """The library that was built for these sources, this CUDA and, among others, the GPUs of this machine."""
    import torch

    present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    for path in sorted(folder().glob(f"*/{NAME}.so")):
        if all(_runs(path.parent.name, capability) for capability in present):
            return path
    return None


def build(verbose: bool = False) -> Path:
    """Compile csrc/ and load it; returns the library. Raises BackendError where a compiler is missing."""
    import torch
    from torch.utils import cpp_extension  # looks for CUDA when it is imported

    needs = {
        "a CUDA build of torch": torch.version.cuda is not None,
        "a GPU, or TORCH_CUDA_ARCH_LIST": bool(_architectures()),
        # Without a CUDA build torch does not look for the toolkit.
        "nvcc (the CUDA toolkit; CUDA_HOME)": torch.version.cuda is None
        or cpp_extension.CUDA_HOME is not None,
        "a C++ compiler": shutil.which(os.environ.get("CXX", "c++")) is not None,
        "ninja": shutil.which("ninja") is not None,
    }
    missing = [name for name, there in needs.items() if not there]
    if missing:
        raise BackendError(
            f"csrc/ can't be built here, it lacks: {', '.join(missing)}. Fix: install that, or leave "
            f"MMPACK_BACKEND=auto, which goes without csrc/"
        )
    flags = " ".join(cpp_extension._get_cuda_arch_flags())
    target = folder() / "-".join(re.findall(r"code=(\w+)", flags)) / f"{NAME}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        cpp_extension.load(
            name=NAME,
            sources=[str(FOLDER / name) for name in SOURCES],
            extra_cflags=FLAGS,
            extra_cuda_cflags=FLAGS,
            build_directory=work,
            is_python_module=False,
            verbose=verbose,
        )
        with replaced(target, "mmpack.ops.build", BackendError) as file:
            file.write((Path(work) / target.name).read_bytes())
    library.cache_clear()
    return target


def folder() -> Path:
    """Where libraries of these sources and this CUDA are, in a folder named after what they are compiled for."""
    import torch

    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in SOURCES + HEADERS:
        digest.update((FOLDER / name).read_bytes())
    return cache_folder() / f"cuda{torch.version.cuda}-{digest.hexdigest()[:16]}"


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
    import torch

    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if named:
        return named
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def main() -> int:
    try:
        require("torch", "torch", "mmpack.ops.build")
        print(build(verbose="-v" in sys.argv[1:]))
    except (BackendError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
