"""The build hook of platform wheels: with MMPACK_BUILD_CSRC=1 a wheel holds csrc/, compiled; without it, none is.

The library needs neither a GPU nor torch for CUDA to be built, only nvcc, a C++ compiler, binutils and torch's headers:
`MMPACK_BUILD_CSRC=1 pip install --no-build-isolation .` where hatchling and torch are installed. TORCH_CUDA_ARCH_LIST
names other GPUs than sm_80, sm_90 and newer ones.
"""

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        asked = os.environ.get("MMPACK_BUILD_CSRC", "")
        if asked in ("", "0"):
            return
        if asked != "1":
            raise SystemExit(f"MMPACK_BUILD_CSRC is {asked!r}. Fix: set 1, or nothing")
        if version == "editable":
            raise SystemExit(
                "MMPACK_BUILD_CSRC is for wheels. Fix: install without it, then run python -m mmpack.ops.build"
            )
        recipe = _recipe(Path(self.root))
        try:
            named = os.environ.get("TORCH_CUDA_ARCH_LIST")
            codes = recipe.codes_of(named) if named else list(recipe.WHEEL)
            sources = Path(self.root) / "mmpack" / "_csrc"
            compiler = recipe.nvcc()
            if compiler is None:
                raise recipe.RecipeError("csrc/ can't be built here, it lacks: nvcc (CUDA_HOME)")
            place = recipe.place(sources, recipe.cuda_version(compiler), codes)
            self.work = tempfile.TemporaryDirectory(prefix="mmpack-csrc-")
            made = Path(self.work.name) / recipe.LIBRARY
            recipe.build(sources, _torch(), codes, made)
            major, minor = recipe.glibc(made)
        except recipe.RecipeError as error:
            raise SystemExit(
                f"{error}. Fix: install that, or build without MMPACK_BUILD_CSRC"
            ) from None
        build_data["force_include"][str(made)] = f"mmpack/_csrc/built/{place.as_posix()}"
        build_data["pure_python"] = False
        # By itself the library runs on any Python: it is bound to torch, not to CPython.
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "work"):
            self.work.cleanup()


def _recipe(root: Path) -> Any:
    """mmpack/ops/recipe.py by its path: mmpack itself is not installed yet."""
    spec = importlib.util.spec_from_file_location(
        "mmpack_recipe", root / "mmpack" / "ops" / "recipe.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torch() -> Path:
    """The package torch of the environment that builds; it is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "MMPACK_BUILD_CSRC=1 needs torch's headers, and this environment has no torch. "
            "Fix: pip install hatchling torch, then build with --no-build-isolation"
        )
    return Path(spec.origin).parent
