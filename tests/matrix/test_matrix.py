"""The matrix: traces of real frameworks compared pairwise, and none of those that CI installs is missing from it."""

import os
import re
import sys
import types
from pathlib import Path

import pytest
from matrix import traces as matrix

import mmpack as mp
from mmpack.errors import TraceError

ROOT = Path(__file__).resolve().parents[2]


def test_another_version_and_a_folder_without_traces_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix.importlib.util, "find_spec", lambda name: types)
    monkeypatch.setattr(matrix, "installed_version", lambda name: "0.8.0")
    monkeypatch.setitem(sys.modules, "matrix.fixture", types.SimpleNamespace(make_fixture=dict))
    with pytest.raises(TraceError, match=r"verl 0\.8\.0 is not supported\. Fix: install 0\.9"):
        matrix.run(tmp_path, ["verl"])
    with pytest.raises(TraceError, match="has no engine's trace"):
        matrix.compare_traces(tmp_path)


@pytest.mark.slow
def test_what_is_installed_here_runs(tmp_path):
    """transformers, TRL and vime's fields in this environment: real traces, and all of them agree."""
    matrix.run(tmp_path)
    found = matrix.compare_traces(tmp_path)
    assert {("transformers", "trl"), ("transformers", "vime")} <= found.keys()
    assert all(report.ok and report.compared for report in found.values())
    samples = list(mp.read_trace(tmp_path / "trl.jsonl"))
    assert mp.validate(samples) == [] and all(s.rollout_logprobs is not None for s in samples)


@pytest.mark.parametrize(
    "name", [n for n in matrix.NAMES if n not in ("transformers", "trl", "vime")]
)
def test_ci_installs_and_runs_every_framework(name):
    """A framework with an environment of its own is in the list that `make test-frameworks` runs."""
    makefile = (ROOT / "Makefile").read_text()
    ran = re.search(r"^MATRIX := (.*)$", makefile, re.MULTILINE).group(1).split()
    assert name in ran
    pinned = (ROOT / "constraints" / f"{name}.txt").read_text()
    assert any(
        re.search(rf"^{package}==", pinned, re.MULTILINE) for package in matrix.PACKAGES[name][1]
    )
    assert "test-frameworks" in (ROOT / ".ci/run").read_text()


@pytest.mark.skipif("MMPACK_MATRIX" not in os.environ, reason="make test-frameworks says where")
def test_no_framework_that_ci_installs_is_missing():
    folder = Path(os.environ["MMPACK_MATRIX"])
    found = matrix.compare_traces(folder)
    # 3 engines, 5 trainers, transformers not against itself
    assert len(found) == 14 and all(report.compared for report in found.values())
    for (engine, _), report in found.items():
        if engine != "vllm":
            assert report.ok
            continue
        # vLLM counts positions by another rule, and resizes with torchvision: settings differ, layouts here do not
        assert report.first.cause == "position_rule"
        assert {f.field for f in report.findings} <= {"processor", "media"}
        assert all(
            f.field != "media" or "same content and grid" in f.evidence for f in report.findings
        )
    for name in matrix.NAMES:
        version = next(iter(mp.read_trace(folder / f"{name}.jsonl"))).metadata["version"]
        assert version.startswith(matrix.PACKAGES[name][2])
