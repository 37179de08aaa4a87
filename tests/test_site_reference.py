"""The reference of the site: every public name has an entry, with its parameters and its docstring."""

import inspect
import re
from pathlib import Path

import pytest

import mmpack as mp
from mmpack.exports import homes

SITE = Path(__file__).resolve().parent.parent / "docs" / "site"
pytest.importorskip("torch")
ROOMS = {name for name in mp.__all__ if inspect.ismodule(getattr(mp, name))} | {"__version__"}


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    import reference

    return reference


def test_every_public_name_is_on_one_page(reference):
    parts = {home.split(".")[1] for name, home in homes("mmpack").items() if name not in ROOMS}
    pages = [part for _, parts in reference.PAGES.values() for part in parts]
    assert parts == set(pages) and len(pages) == len(set(pages))
    assert ROOMS - {"__version__"} <= set(reference.ROOMS)


@pytest.mark.parametrize("name", sorted(set(mp.__all__) - ROOMS))
def test_an_entry_has_the_parameters_and_the_words(reference, name):
    value, known = getattr(mp, name), set()
    text = "\n".join(reference.entries("mmpack", {name: value}, known))
    assert f"mmpack.{name}" in known and inspect.getdoc(value)
    head = next(line for line in text.splitlines() if line.startswith("````````{py:"))
    if inspect.isfunction(value):
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"\b{parameter}\b", head), parameter
    words = re.findall(r"[A-Za-z]{4,}", inspect.getdoc(value))
    assert [word for word in words if word not in text] == []
