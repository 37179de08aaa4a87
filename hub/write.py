"""Write mmpack's ops as kernels for the Hugging Face hub, as kernel-builder wants them: `python hub/write.py [FOLDER]`.

The project is Python (plain torch and Triton), for CPUs, CUDA and ROCm, and is written built too, for its build is a
copy. A kernel may import the standard library, torch and itself: modules of mmpack that its functions need are copied,
with imports that are relative, and what stands in `hub/own` takes the place of mmpack's.
"""

from __future__ import annotations

import argparse
import ast
import base64
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HUB = ROOT / "hub"
VERSION = (
    0  # the hub's convention for what may still change; counts up with each change of the functions
)
LICENSE = "Apache-2.0"
BACKENDS = ("cpu", "cuda", "rocm")

FLAKE = """{
  description = "mmpack";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""

# What kernel-builder would generate, for the builds that are written here.
OPS = '''"""The name of this build in torch."""

import torch

_NAME = "{name}"
ops = getattr(torch.ops, _NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """The op's name in torch."""
    return f"{{_NAME}}::{{op_name}}"
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "hub")
    parser.add_argument("--owner", help="the hub's user or organization that the kernels are for")
    options = parser.parse_args()
    print(write(options.folder, options.owner))


def write(folder: Path, owner: str | None = None) -> Path:
    """The project below `folder`, which may hold an older one; returns its folder."""
    folder, files = folder / "mmpack", package()
    _project(folder, files, owner)
    for backend in BACKENDS:
        _build(folder, files, backend)
    return folder


def _project(folder: Path, files: dict[str, str], owner: str | None) -> None:
    """A project of kernel-builder: build.toml, flake.nix, a card, and the package below torch-ext/."""
    if folder.exists():
        shutil.rmtree(folder)
    name = folder.name
    repository = f"{owner or 'OWNER'}/{name}"
    general = f"""[general]
name = "{name}"
version = {VERSION}
edition = 5
license = "{LICENSE}"
backends = {json.dumps(BACKENDS)}

"""
    if owner is not None:
        general += f'[general.hub]\nrepo-id = "{repository}"\n\n'
    card = (HUB / "CARD.md").read_text()
    functions = "\n".join(f"- `{name}`" for name in _public(files["__init__.py"]))
    for word, text in {
        "REPOSITORY": repository,
        "VERSION": str(VERSION),
        "FUNCTIONS": functions,
    }.items():
        card = card.replace(word, text)
    _write(
        folder, {"build.toml": general + "[torch-noarch]\n", "flake.nix": FLAKE, "CARD.md": card}
    )
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    _write(folder / "torch-ext" / name.replace("-", "_"), files)


def _build(folder: Path, files: dict[str, str], backend: str) -> None:
    """A built variant, `build/torch-BACKEND`: the package, the build's name and its metadata with sums of all files."""
    name = folder.name.replace("-", "_")
    text = "".join(f"{path}\n{content}" for path, content in sorted(files.items()))
    unique = hashlib.sha256(text.encode()).hexdigest()[:7]
    build = f"_{name}_{backend}_{unique}"
    all_files = files | {"_ops.py": OPS.format(name=build)}
    sums = {path: hashlib.sha256(content.encode()) for path, content in sorted(all_files.items())}
    metadata = {
        "name": folder.name,
        "id": build,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {p: base64.b64encode(s.digest()).decode() for p, s in sums.items()},
        },
    }
    all_files["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    _write(folder / "build" / f"torch-{backend}", all_files)


def package() -> dict[str, str]:
    """The kernel's Python files, by their path in it: those of `hub/own`, and all of mmpack that they need."""
    own = HUB / "own"
    files = {_module(path.relative_to(own)): path.read_text() for path in own.rglob("*.py")}
    made: dict[str, str] = {}
    todo = ["mmpack", "mmpack.layers"]
    while todo:
        name = todo.pop()
        place = _place(name)
        if place in made:
            continue
        source = files[name] if name in files else (ROOT / "mmpack" / place).read_text()
        source = source.partition("from mmpack.exports")[0]  # names of mmpack's, not the kernel's
        made[place] = relative(source, place)
        todo += _needed(source, name, files)
        if "." in name:
            todo.append(name.rpartition(".")[0])
    return made


def relative(source: str, place: str) -> str:
    """`source`, which becomes the file `place`, with imports of mmpack that are relative."""
    lines = source.splitlines(keepends=True)
    dots = "." * len(Path(place).parts)
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import) and any(a.name.startswith("mmpack") for a in node.names):
            raise ValueError(f"{place}: line {node.lineno} imports a module of mmpack whole")
        if isinstance(node, ast.ImportFrom) and _is_ours(node):
            line = lines[node.lineno - 1]
            rest = (node.module or "").removeprefix("mmpack").removeprefix(".")
            lines[node.lineno - 1] = re.sub(
                r"from mmpack[\w.]*", f"from {dots}{rest}", line, count=1
            )
    return "".join(lines)


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _needed(source: str, name: str, own: dict[str, str]) -> Iterator[str]:
    """The modules of mmpack that a module imports, but for types, and those that an `Op` of it names."""
    tree = _tree(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node) and id(node) not in for_types:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in own or _exists(module) else str(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Op":
            yield from (f"{name}.{b}" for b in ("torch", "triton") if _exists(f"{name}.{b}"))


def _is_ours(node: ast.ImportFrom) -> bool:
    return node.level == 0 and str(node.module).split(".")[0] == "mmpack"


def _exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _place(module: str) -> str:
    """Of a module of mmpack, its file in the kernel."""
    path = module.replace(".", "/")
    is_package = (ROOT / path / "__init__.py").exists()
    return str(Path(f"{path}/__init__.py" if is_package else f"{path}.py").relative_to("mmpack"))


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("mmpack", *(part for part in parts if part != "__init__")))


def _public(source: str) -> list[str]:
    """The names of `__all__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError("the kernel has no __all__")


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
