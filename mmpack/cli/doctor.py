"""`mmpack doctor`: which versions and devices are here, and which op runs on what.

It says what is missing, and exits with 0 whatever it finds.
"""

from __future__ import annotations

import platform
from typing import Any

from mmpack._version import __version__
from mmpack.cli.output import Result, table
from mmpack.errors import installed_version

EXTRAS = {  # package -> the extra of mmpack that installs it
    "numpy": None,
    "torch": "torch",
    "transformers": "hf",
    "tokenizers": "hf",
    "pillow": "hf",
    "triton": "triton",
    "typer": "cli",
    "rich": "cli",
    "pyarrow": "parquet",
    "zstandard": "zstd",
    "datasets": "data",
    "av": "video",
    "soundfile": "audio",
    "soxr": "audio",
    "decord": "decord",
    "torchcodec": "torchcodec",
    "flash-attn-4": "fa4",
    "fla-core": "fla",
    "dashscope": "smoke",
}


def command() -> Result:
    """Show the versions of mmpack, Python and packages, the accelerators that torch finds, and each op's backend.

    Examples:
        mmpack doctor
        mmpack doctor --json
    """
    packages = {name: installed_version(name) for name in EXTRAS}
    devices = _devices(packages["torch"])
    about = {
        "mmpack": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    ops = _ops(devices)
    rows = [*about.items(), *((name, found or _missing(name)) for name, found in packages.items())]
    tables = [table(("what", "here"), [*rows, *_device_rows(devices)])]
    if ops:
        shown = [(op["op"], op["backend"] or "raises", op["why"]) for op in ops]
        tables.append(table(("op", "backend", "why"), shown))
    return Result(about | {"packages": packages, "devices": devices, "ops": ops}, tables)


def _missing(package: str) -> str:
    extra = EXTRAS[package]
    return "not installed" + (f": pip install 'mmpack[{extra}]'" if extra else "")


def _devices(torch_version: str | None) -> dict[str, Any]:
    """`kind` (cuda, rocm or null), `names`, and `error` if torch can't be asked."""
    found: dict[str, Any] = {"kind": None, "names": [], "error": None}
    if torch_version is None:
        return found
    try:
        import torch

        if torch.cuda.is_available():
            found["kind"] = "rocm" if torch.version.hip else "cuda"
            found["names"] = [
                torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
            ]
    except Exception as error:  # a broken torch is what a doctor is asked about
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _ops(devices: dict[str, Any]) -> list[dict[str, Any]]:
    """What runs each op on the first accelerator, or on the CPU; empty where there is no torch that works."""
    if devices["error"] or installed_version("torch") is None:
        return []
    import torch

    from mmpack.losses.table import OPS as losses
    from mmpack.ops import backend
    from mmpack.ops.attention import SEQUENCES, TREE
    from mmpack.ops.linear_attention import choose as linear
    from mmpack.ops.table import OPS as ops

    device = torch.device("cuda" if devices["names"] else "cpu")
    rows = [*backend.report([*ops, *losses], device)]
    rows += [chooser.report(device) for chooser in (TREE, SEQUENCES, linear)]
    return [{"op": op, "backend": backend, "why": why} for op, backend, why in rows]


def _device_rows(devices: dict[str, Any]) -> list[tuple[str, str]]:
    if devices["error"]:
        return [("devices", f"torch fails: {devices['error']}")]
    if not devices["names"]:
        return [("devices", "no CUDA or ROCm device")]
    return [(f"{devices['kind']}:{i}", name) for i, name in enumerate(devices["names"])]
