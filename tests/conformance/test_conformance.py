"""Every family that has a kit against the conformance checks, the longer ones marked slow; `pytest --family NAME`.

The plugin gives families and checks: `pytest.mark.adapter` to the shorter ones, which older transformers run too, else
`pytest.mark.slow`; and `pytest.mark.verl`, `pytest.mark.upstream`. Models are made once; one family at a time is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conformance.agree import NotHere
from conformance.oracle import torch_functions
from conformance.subject import Subject
from support.kits import get_kit

pytestmark = pytest.mark.few(9)
_HELD: dict[str, Subject] = {}


@pytest.fixture
def subject(family: str, check: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The family's `Subject`; skips, with the reason, where the family or this machine lacks something."""
    kit = get_kit(family)
    properties = request.node.user_properties
    properties += [("family", family), ("check", check.name), ("packages", check.packages)]
    lacks = dict(kit.lacks)
    if check.packs and kit.about.packing != "yes":
        lacks[check.name] = "it can't be packed (MM401)"
    if check.name in lacks:
        properties.append(("lacks", lacks[check.name]))
        pytest.skip(f"{family}: {lacks[check.name]}")
    if family not in _HELD:
        _HELD.clear()
        try:
            _HELD[family] = Subject(kit)
        except NotHere as error:
            pytest.skip(str(error))
    yield _HELD[family]


def test_family(subject: Subject, check: Any) -> None:
    try:
        with torch_functions(subject.model):
            check.run(subject)
    except NotHere as error:
        pytest.skip(str(error))
