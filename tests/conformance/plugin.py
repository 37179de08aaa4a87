"""pytest's side: `--family NAME` runs the checks of a family, `--kit MODULE:KIT` those of one's own.

`--results FOLDER` keeps what came out. The module of a kit must be importable: PYTHONPATH=its folder.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from conformance.results import Results

_TESTS = Path(__file__).with_name("test_conformance.py")
_MARKERS = {"adapter": "of an adapter to transformers", "slow": "takes minutes", "verl": "of verl"}
_MARKERS["upstream"] = "beside processors that need torchvision"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mmpack", "conformance of model families (mmpack)")

    def add(name: str, metavar: str, says: str) -> None:
        group.addoption(name, action="append", default=[], metavar=metavar, help=says)

    add("--family", "NAME", "run the checks of this family alone; may be repeated")
    add("--kit", "MODULE:KIT", "run those of a kit of one's own, whose module registers its family")
    add("--check", "CHECK", "of the checks only this one; may be repeated")
    group.addoption("--results", metavar="FOLDER", help="write FOLDER/<family>.json")


def pytest_configure(config: pytest.Config) -> None:
    known = {line.partition(":")[0].strip() for line in config.getini("markers")}
    for name in _MARKERS.keys() - known:
        config.addinivalue_line("markers", f"{name}: {_MARKERS[name]}")
    if not _chosen(config):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(_TESTS)]
    folder = config.getoption("--results")
    if folder:
        config.pluginmanager.register(Results(Path(folder)), "mmpack-results")


def _chosen(config: pytest.Config) -> list[str]:
    """Families by name, and those of kits, which are registered here."""
    names = list(config.getoption("--family"))
    for given in config.getoption("--kit"):
        module, colon, attribute = given.partition(":")
        if not colon:
            raise pytest.UsageError(
                f"--kit {given}: expected MODULE:KIT, as in my_families.mine:KIT"
            )
        from support.kits import register_kit

        names.append(register_kit(getattr(importlib.import_module(module), attribute)).family)
    return list(dict.fromkeys(names))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check of every chosen family, family by family; without a choice of all, the longer ones marked slow."""
    if (
        not {"family", "check"} <= set(metafunc.fixturenames)
        or "subject" not in metafunc.fixturenames
    ):
        return
    from conformance.checks import CHECKS
    from support.kits import get_kit, kit_names

    chosen, only = _chosen(metafunc.config), metafunc.config.getoption("--check")
    for option, names, known in (
        ("--family", chosen, kit_names()),
        ("--check", only, list(CHECKS)),
    ):
        for name in names:
            if name not in known:
                raise pytest.UsageError(
                    f"{option} {name} is unknown, use one of {', '.join(known)}"
                )
    params = []
    for family in chosen or kit_names():
        heavy = get_kit(family).heavy
        for check in [CHECKS[name] for name in only or CHECKS]:
            slow = not chosen and (check.slow or (heavy and check.packs))
            marks: list[Any] = [pytest.mark.slow if slow else pytest.mark.adapter]
            marks += [pytest.mark.verl] if check.name == "verl" else []
            if check.name == "layout" and get_kit(family).needs_torchvision:
                marks.append(pytest.mark.upstream)  # the environment that has it
            params.append(pytest.param(family, check, id=f"{family}-{check.name}", marks=marks))
    metafunc.parametrize(("family", "check"), params)
