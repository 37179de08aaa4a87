"""What an import and a command load, and that every public name is where it says."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
from support.process import run_python
from support.samples import full_sample

import mmpack as mp
from mmpack.exports import homes

HEAVY = ("torch", "transformers", "triton", "pyarrow", "typer", "rich")
LOADED = f"import json; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"


def loaded(code, *args):
    result = run_python(f"import sys\n{code}\n{LOADED}", *args)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_is_light():
    assert loaded("import mmpack, mmpack.cli.main; dir(mmpack)") == []
    assert loaded("import pyarrow") == ["pyarrow"]  # so the list above could have been longer


@pytest.mark.parametrize("args", [["parity"], ["plan"]])
def test_commands_load_no_torch(tmp_path, args):
    path = str(tmp_path / "a.jsonl")
    mp.write_trace(path, [full_sample()])
    more = {"parity": [path, path], "plan": [path, "--max-tokens", "99"]}
    args = [*args, *more.get(args[0], [path])]
    code = "from mmpack.cli.main import main; assert main() == 0"
    assert loaded(code, *args) == ["typer", "rich"]


def test_the_schema_side_loads_no_torch(tmp_path):
    path = tmp_path / "a.jsonl"
    mp.write_trace(path, [full_sample()])
    code = """
import mmpack as mp
from mmpack.exports import homes
samples = list(mp.read_trace(sys.argv[1]))
assert mp.validate(samples) == [] and mp.plan(samples, max_tokens=99).total_samples == 1
assert mp.compare(samples, samples).compared == 1
mp.mrope_positions, mp.wrap_processor
for name in mp.trajectory.__all__:
    getattr(mp.trajectory, name)
assert mp.trajectory.find_actions(samples[0], lambda i: b"x").spans == []
"""
    assert loaded(code, str(path)) == []


ROOMS = {name for name, home in homes("mmpack").items() if home == "mmpack"}
LAZY = [path.parent for path in Path(mp.__file__).parent.rglob("__init__.pyi")]


@pytest.mark.parametrize("folder", LAZY, ids=lambda folder: folder.name)
def test_every_public_name_resolves(folder):
    package = importlib.import_module(
        f"mmpack.{folder.name}" if folder.name != "mmpack" else "mmpack"
    )
    for name, home in homes(package.__name__).items():
        value = getattr(package, name)
        assert callable(value) or name in {"__version__", *ROOMS}, name
        assert home == "mmpack" or value is getattr(importlib.import_module(home), name)


def test_no_room_bears_the_name_of_a_function():
    """Importing it would put a module in the function's place."""
    rooms = {module.name for module in pkgutil.iter_modules(mp.__path__)}
    assert rooms & set(mp.__all__) == ROOMS and "packing" in rooms


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'repack'"):
        _ = mp.repack
