"""pytest's side: a family of one's own with its kit, what can't be asked for, and that a fault is named and kept."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance.agree import close, same
from conformance.checks import CHECKS
from conformance.checks.layouts import parity, positions
from conformance.checks.packing import share
from conformance.subject import Subject
from support.kits import get_kit, kit_names

from mmpack.layout import mrope

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"


def run(folder, *arguments):
    """Of the checkout, with modules of `folder`."""
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_family_of_one_s_own_outside_of_this_project(tmp_path):
    """The page's, in a folder that holds nothing else."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    code += '\nKIT = replace(KIT, lacks={"video": "no clips"})\n'
    (tmp_path / "my_families.py").write_text(code, encoding="utf-8")
    asked = ["parity", "video"]
    checks = [word for name in asked for word in ("--check", name)]
    done = run(
        tmp_path, "--kit", "my_families:KIT", *checks, "--results", str(tmp_path / "out"), "-rs"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout and "mine: no clips" in done.stdout
    kept = json.loads((tmp_path / "out" / "mine.json").read_text())
    assert kept["family"] == "mine" and list(kept["checks"]) == ["parity", "video"]
    assert kept["checks"]["video"] == {"result": "lacks", "why": "no clips"}
    ran = kept["checks"]["parity"]
    assert ran["result"] == "passed" and ran["versions"]["torch"] == torch.__version__


@pytest.fixture(scope="module")
def subject():
    return Subject(get_kit("qwen2_5_vl"))


def test_a_wrong_position_rule_is_found(subject, monkeypatch):
    real = mrope.positions_of_lines

    def shifted(*arguments):
        values = real(*arguments)
        values[0, -1] += 1
        return values

    monkeypatch.setattr(mrope, "positions_of_lines", shifted)
    with pytest.raises(AssertionError, match="positions of sample s0: entry"):
        positions(subject)


def test_a_parity_that_says_nothing_is_found(subject, monkeypatch):
    from conformance.checks import layouts

    right = layouts.compare
    monkeypatch.setattr(layouts, "compare", lambda a, b: right(a, a))
    with pytest.raises(AssertionError, match="not_expanded on the train side: parity is ok"):
        parity(subject)


def test_wrong_rows_are_found(subject, monkeypatch):
    from conformance.checks import packing

    right = packing.pack_samples

    def moved(samples, **options):
        batch = right(samples, **options)
        batch.position_ids[1:, ::3] += 1
        batch.attention_plan.cover(position_ids=batch.position_ids)
        return batch

    monkeypatch.setattr(packing, "pack_samples", moved)
    with pytest.raises(AssertionError, match="shared, rounded up: loss token"):
        share(subject)


def test_a_nan_is_no_agreement():
    with pytest.raises(AssertionError, match="x: loss token 1 is nan"):
        close(torch.tensor([0.0, float("nan")]), torch.zeros(2), "x")
    with pytest.raises(AssertionError, match="x: entry 1 is 3, expected 2"):
        same(np.array([1, 3]), np.array([1, 2]), "x")


def test_every_family_has_a_kit_whose_lacks_are_checks():
    from mmpack.families import FAMILIES

    assert kit_names() == list(FAMILIES)
    for name in kit_names():
        assert get_kit(name).lacks.keys() <= CHECKS.keys(), name
