"""What adapters say they were run with is what the environments pin, and there is a line for each adapter."""

import importlib.metadata

import pytest
from support import tried_with


def test_the_table_and_the_docstrings_are_those_of_the_pins():
    for path, text in tried_with.wanted().items():
        assert path.read_text(encoding="utf-8") == text, path


@pytest.mark.parametrize("adapter", ["torch", "datasets", "trl"])
def test_this_environment_has_what_is_said(adapter):
    for part in tried_with.tried_with(adapter).split(", "):
        package, _, version = part.partition(" ")
        if package != "deepspeed":
            found = importlib.metadata.version(package).partition("+")[0]
            assert found == version, package
