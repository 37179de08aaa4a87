"""What the checks of a family gave, as JSON: check → result, why, and the versions that it ran on.

A check that was skipped leaves what an earlier run, in another environment, wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmpack.errors import installed_version
from mmpack.files import write_text

BASE = ("transformers", "torch")  # whose versions every result holds


class Results:
    """A plugin that gathers reports and writes `folder/<family>.json` at the end of the session."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        about: dict[str, Any] = dict(report.user_properties)
        if "check" not in about:
            return
        checks = self.found.setdefault(about["family"], {})
        versions = {name: installed_version(name) for name in (*BASE, *about["packages"])}
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            said = [line[1:].strip() for line in lines if line.startswith("E ")] or lines
            checks[about["check"]] = {"result": "failed", "why": said[-1], "versions": versions}
        elif report.skipped and "lacks" in about:
            checks[about["check"]] = {"result": "lacks", "why": about["lacks"]}
        elif report.when == "call" and report.passed:
            checks[about["check"]] = {"result": "passed", "versions": versions}

    def pytest_sessionfinish(self) -> None:
        from conformance.checks import CHECKS

        self.folder.mkdir(parents=True, exist_ok=True)
        for family, new in self.found.items():
            path = self.folder / f"{family}.json"
            old = json.loads(path.read_text("utf-8"))["checks"] if path.exists() else {}
            checks = {name: (old | new)[name] for name in CHECKS if name in old | new}
            text = json.dumps({"family": family, "checks": checks}, indent=2, ensure_ascii=False)
            write_text(path, text + "\n")
