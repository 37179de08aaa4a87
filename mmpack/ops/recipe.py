"""How csrc/ becomes a library: nvcc, a C++ compiler and the headers of any torch, with a GPU or without.

Only the standard library is imported: the build hook of a platform wheel runs this file where mmpack is not installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "mmpack_native"
LIBRARY = f"{NAME}.so"
SOURCES = (
    "bind.cpp",
    "gather_rows.cu",
    "pack_video.cu",
    "policy_loss.cu",
    "rewards.cu",
    "tickets.cu",
)
HEADERS = ("ops.h", "portable.h")
TORCH = (2, 11)  # the stable ABI that the library is built for: any torch since then loads it
FLAGS = [
    "-O3",
    "-std=c++17",
    "-DUSE_CUDA",
    f"-DTORCH_TARGET_VERSION=0x{TORCH[0]:02x}{TORCH[1]:02x}000000000000",
]
WHEEL = ("sm_80", "sm_90", "compute_90")  # newer GPUs compile the last one, PTX, when they load it


class RecipeError(Exception):
    """Why csrc/ could not be compiled, in one line."""


def codes_of(architectures: str) -> list[str]:
    """What nvcc calls "8.0;9.0a+PTX", a TORCH_CUDA_ARCH_LIST: ["sm_80", "sm_90a", "compute_90a"]."""
    codes = []
    for entry in re.split(r"[; ,]+", architectures.strip("; ,")):
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if found is None:
            raise RecipeError(
                f"TORCH_CUDA_ARCH_LIST has {entry!r}. Fix: write capabilities as numbers, such as '8.0;9.0+PTX'"
            )
        number = found[1] + found[2] + found[3]
        codes += [f"sm_{number}"] + ([f"compute_{number}"] if found[4] else [])
    return codes


def nvcc() -> Path | None:
    """That of CUDA_HOME or CUDA_PATH, else of PATH, else of /usr/local/cuda; None where there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    named = [Path(home) / "bin" / "nvcc" for home in homes if home]
    found = shutil.which("nvcc")
    places = [*named, *([Path(found)] if found else []), Path("/usr/local/cuda/bin/nvcc")]
    return next((place for place in places if place.is_file()), None)


def cxx() -> str | None:
    """The C++ compiler: CXX, else c++; None where there is none."""
    return shutil.which(os.environ.get("CXX") or "c++")


def cuda_version(compiler: Path) -> str:
    """Of nvcc: "13.0"."""
    found = re.search(r"release (\d+\.\d+)", _run(compiler, "--version"))
    if found is None:
        raise RecipeError(
            f"{compiler} --version names no release. Fix: set CUDA_HOME to a CUDA toolkit"
        )
    return found[1]


def digest(sources: Path) -> str:
    """16 figures for these sources and flags."""
    made = hashlib.sha256(" ".join(FLAGS).encode())
    for name in SOURCES + HEADERS:
        made.update((sources / name).read_bytes())
    return made.hexdigest()[:16]


def place(sources: Path, cuda: str, codes: Sequence[str]) -> Path:
    """Where the library lies below a folder of libraries: of which CUDA, which sources, for which GPUs."""
    return Path(family(sources, cuda)) / "-".join(codes) / LIBRARY


def family(sources: Path, cuda: str) -> str:
    """The folder of libraries of these sources that load beside a torch of this CUDA, whose minor may differ."""
    return f"cuda{cuda.partition('.')[0]}-{digest(sources)}"


def build(sources: Path, torch: Path, codes: Sequence[str], target: Path) -> None:
    """Compile the sources for `codes` with the headers of the package `torch`, and link them to the file `target`.

    Raises RecipeError where a compiler is missing or fails.
    """
    compiler, linker = nvcc(), cxx()
    needs = {
        "nvcc (the CUDA toolkit; CUDA_HOME)": compiler is not None,
        "a C++ compiler": linker is not None,
        "torch's headers": (torch / "include/torch/csrc/stable/library.h").is_file(),
    }
    missing = [name for name, there in needs.items() if not there]
    if compiler is None or linker is None or missing:
        raise RecipeError(f"csrc/ can't be built here, it lacks: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        objects = [work / f"{name}.o" for name in SOURCES]
        common: list[str | Path] = [compiler, "-ccbin", linker, *(_gencode(code) for code in codes)]
        commands = [
            [
                *common,
                *FLAGS,
                "-Xcompiler=-fPIC",
                f"-I{torch / 'include'}",
                "-c",
                sources / name,
                "-o",
                made,
            ]
            for name, made in zip(SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: _run(*command), commands))
        _run(
            *(*common, "-shared", "-cudart=shared", *objects, "-o", target),
            "-Xlinker=-s,--as-needed,--no-undefined,--unresolved-symbols=ignore-in-shared-libs",
            *(f"-L{_stand_in(linker, work)}", "-ltorch_cuda", f"-L{torch / 'lib'}", "-ltorch_cpu"),
        )


def glibc(library: Path) -> tuple[int, int]:
    """The newest glibc that the library asks for, as (2, 32). Raises RecipeError without binutils."""
    objdump = shutil.which("objdump")
    if objdump is None:
        raise RecipeError(
            "there is no objdump to ask which glibc a library needs. Fix: install binutils"
        )
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", _run(objdump, "-T", library))
    return max((int(major), int(minor)) for major, minor in found)


def _stand_in(linker: str, work: Path) -> Path:
    """A folder with a library of the name of torch's for CUDA, and of its functions the one that bind.cpp calls.

    So a torch without CUDA can link too, and every torch gives the same library. A process loads torch's own.
    """
    source, made = work / "torch_cuda.c", work / "libtorch_cuda.so"
    source.write_text("void aoti_torch_get_current_cuda_stream(void) {}\n")
    _run(linker, "-xc", "-shared", "-fPIC", f"-Wl,-soname,{made.name}", source, "-o", made)
    return work


def _gencode(code: str) -> str:
    return f"-gencode=arch=compute_{code.partition('_')[2]},code={code}"


def _run(*command: str | Path) -> str:
    """What a command prints. RecipeError with its first line of error where it fails."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if "error" in line] or [
            *result.stderr.splitlines(),
            f"exit {result.returncode}",
        ]
        name = Path(command[0]).name
        raise RecipeError(f"csrc/ can't be built here: {name} says: {said[0].strip()}")
    return result.stdout
