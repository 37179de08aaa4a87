"""docs/threat_model.md's limits are those of the code, and the tests that it names are there."""

import importlib
import re
from pathlib import Path

import pytest

import mmpack as mp

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "threat_model.md").read_text(encoding="utf-8")
ROW = r"^\| .+ \| ([\d,]+) \| `(mmpack\.[\w.]+)`(?:, `(\w+)`)? \|$"
LIMITS = [
    (said, f"{name}.{field}".rstrip("."))
    for said, name, field in re.findall(ROW, PAGE, re.MULTILINE)
]


def value(name):
    """Of a dotted name: a module's, or that of a class in it."""
    home, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(home), last)
    except ModuleNotFoundError:
        module, _, cls = home.rpartition(".")
        return getattr(getattr(importlib.import_module(module), cls), last)


@pytest.mark.parametrize(("said", "name"), LIMITS, ids=[name for _, name in LIMITS])
def test_a_limit_is_that_of_the_code(said, name):
    assert int(said.replace(",", "")) == value(name)


def test_every_line_of_the_table_is_read():
    table = PAGE.split("<!-- limits")[1].split("<!-- /limits -->")[0]
    assert len(LIMITS) == sum(line.startswith("| ") for line in table.splitlines()) - 2 > 10


def test_tests_that_it_names_exist():
    named = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(named) > 7 and all((ROOT / name).is_file() for name in named)


def test_the_version_that_gets_fixes_is_this_one():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    (version,) = re.findall(r"^\| (\d+\.\d+) \| yes \|$", page, re.MULTILINE)
    assert mp.__version__.startswith(f"{version}.")
