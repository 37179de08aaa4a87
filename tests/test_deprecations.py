"""What is deprecated works, warns at the caller's line, and is gone in the version that it names."""

import importlib
from pathlib import Path

import pytest
from packaging.version import Version

import mmpack as mp
from mmpack.deprecated import DECLARED, deprecated


@pytest.fixture(autouse=True)
def declared():
    """What the tests declare is forgotten."""
    before = list(DECLARED)
    yield
    DECLARED[:] = before


def test_a_call_works_and_warns_where_it_stands():
    @deprecated(since="0.2.0", removed="0.4.0", instead="call new()")
    def old(x, y=2):
        """Adds."""
        return x + y

    with pytest.warns(mp.errors.DeprecatedWarning) as caught:
        assert old(1, y=4) == 5
    (warning,) = caught
    assert warning.filename == __file__ and old.__doc__ == "Adds."
    assert str(warning.message).endswith(
        "old is deprecated since mmpack 0.2.0, removed in 0.4.0. Fix: call new()"
    )
    assert isinstance(warning.message, FutureWarning)  # Python shows it


def test_this_version_has_nothing_that_it_said_would_be_gone():
    @deprecated(since="0.2.0", removed="0.4.0", instead="call new()")
    def old():
        return 1

    name = f"{old.__module__}.{old.__qualname__}"
    assert overdue(DECLARED[-1:], "0.3.9") == [] and overdue(DECLARED[-1:], "0.4.0") == [name]
    DECLARED.pop()
    root = Path(mp.__file__).parent
    for path in root.rglob("*.py"):
        if "from mmpack.deprecated import" in path.read_text(encoding="utf-8"):
            module = path.relative_to(root.parent).with_suffix("").parts
            importlib.import_module(".".join(part for part in module if part != "__init__"))
    assert overdue(DECLARED, mp.__version__) == []
    assert all(Version(d.since) < Version(d.removed) for d in DECLARED)


def overdue(declared, version):
    return [d.name for d in declared if Version(d.removed) <= Version(version)]
