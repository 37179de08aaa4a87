"""The library prints nothing, logs under one name, and warns with categories of its own."""

import ast
import inspect
import logging
import re
import warnings
from pathlib import Path

import pytest
from support.process import run_python

import mmpack as mp
import mmpack.deprecated
import mmpack.errors

ROOT = Path(mp.__file__).resolve().parent
COMMANDS = ("cli", "smoke")  # they speak to a person


def calls(tree):
    """Calls, but those of a `main`: a module that is a command too."""
    for node in tree.body:
        if not (isinstance(node, ast.FunctionDef) and node.name == "main"):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def test_nothing_prints_and_every_warning_has_a_category_of_mmpack():
    rooms = (mmpack.errors, mmpack.deprecated)
    own = {
        name
        for room in rooms
        for name, value in vars(room).items()
        if inspect.isclass(value) and issubclass(value, mp.MmpackWarning)
    }
    used = set()
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.relative_to(ROOT).parts[0] in COMMANDS or not re.search(r"\bprint\(|warn\(", text):
            continue
        for call in calls(ast.parse(text)):
            function = ast.unparse(call.func)
            assert function != "print", f"{path}:{call.lineno}"
            if function == "warnings.warn":
                given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "category")]
                assert given and ast.unparse(given[0]) in own, f"{path}:{call.lineno}"
                used.add(ast.unparse(given[0]))
    assert used >= {"GroupWarning", "UnwrittenWarning"}


def test_one_category_switches_them_all(tmp_path):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("error", mp.MmpackWarning)
        with pytest.raises(mp.errors.GroupWarning, match="alone in its group"):
            mp.group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
        warnings.simplefilter("ignore", mp.MmpackWarning)
        mp.group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    assert issubclass(mp.errors.UnwrittenWarning, RuntimeWarning)


def test_log_lines_are_heard_only_where_logging_is_set_up():
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("mmpack").handlers)
    said = "import mmpack, logging\n{}\nlogging.getLogger('mmpack').warning('compiling')"
    assert run_python(said.format("")).stderr == ""
    assert "compiling" in run_python(said.format("logging.basicConfig()")).stderr
