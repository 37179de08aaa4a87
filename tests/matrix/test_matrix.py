"""The matrix: traces of real frameworks compared pairwise, and none of those that CI installs is missing from it."""

import os
import re
import sys
import types
from pathlib import Path

import pytest
from matrix import traces as matrix
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import TraceError
from mmpack.layout.mrope import sample_positions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def traces(tmp_path):
    """One set of samples as every framework's trace."""
    samples = [
        make_sample(
            [("text", [5, 6 + i]), ("image", (1, 4, 6)), ("text", [7]), ("response", [8, 9 + i])],
            sample_id=f"s{i}",
        )
        for i in range(3)
    ]
    for s in samples:
        s.position_ids = sample_positions(s)[0]
    for name in matrix.NAMES:
        write(tmp_path, name, samples)
    return tmp_path, samples


def write(folder, name, samples):
    for s in samples:
        s.metadata = {"matrix": {"name": name, "version": "1.2", "transformers": "5.0"}}
    mp.write_trace(folder / f"{name}.jsonl", samples)


def cell(found, engine, trainer):
    return next(c for c in found.cells if (c.engine, c.trainer) == (engine, trainer))


def test_every_pair_is_compared_and_the_first_mismatch_named(traces):
    folder, samples = traces
    found = matrix.compare_traces(folder)
    assert found.ok and {(c.verdict[0], c.report.compared) for c in found.cells} == {("✓", 3)}
    pairs = {(c.engine, c.trainer) for c in found.cells}
    # 3 engines, 5 trainers, transformers not against itself
    assert len(pairs) == len(found.cells) == 14
    (folder / "vllm.jsonl").unlink()
    for name, moved in (("trl", None), ("verl", 5)):
        for s in samples:
            s.position_ids = None if moved is None else sample_positions(s)[0] + moved
        write(folder, name, samples)
    found = matrix.compare_traces(folder)
    assert not found.ok
    assert found.frameworks["vllm"] is None and found.frameworks["verl"] == "1.2, transformers 5.0"
    assert cell(found, "vllm", "verl").verdict == "vllm not installed"
    assert cell(found, "sglang", "trl").verdict == "✓ but position_ids"
    # no padding was recorded
    assert cell(found, "sglang", "verl").verdict == "unknown: position_ids at 0"
    with pytest.raises(TraceError, match="has no trace"):
        matrix.compare_traces(folder / "nowhere")


def test_a_broken_framework_or_another_version_is_named_and_the_others_compared(
    tmp_path, monkeypatch
):
    def broken(fixture):
        raise ImportError("no such file: libsomething.so\nand more")

    runner = types.SimpleNamespace(matrix_trace=broken)
    monkeypatch.setitem(sys.modules, "matrix.vime_trace", runner)
    monkeypatch.setattr(matrix, "installed", lambda: {"verl": "0.8.0", "vime": "5.0"})
    failed = matrix.run(tmp_path)
    assert failed == {
        "verl": "0.8.0 is not supported (0.9.*)",
        "vime": "5.0 failed (ImportError: no such file: libsomething.so)",
    }
    assert matrix.run(tmp_path, only=["vllm"]) == {}
    with pytest.raises(mp.errors.TraceError, match=r"verl 0\.8\.0 is not supported"):
        matrix.compare_traces(tmp_path, failed)


@pytest.mark.slow
def test_what_is_installed_here_runs(tmp_path):
    """transformers, TRL and vime's fields in this environment: real traces, and all of them agree."""
    assert matrix.run(tmp_path) == {}
    found = matrix.compare_traces(tmp_path)
    assert all(found.frameworks[name] for name in ("transformers", "trl", "vime"))
    assert cell(found, "transformers", "trl").ok and cell(found, "transformers", "vime").ok
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
    found = matrix.compare_traces(Path(os.environ["MMPACK_MATRIX"]))
    assert [name for name, made in found.frameworks.items() if made is None] == []
    assert [c for c in found.cells if not c.ok and c.engine != "vllm"] == []
    # vLLM counts positions by another rule, and resizes with torchvision: settings differ, layouts here do not
    for trainer in matrix.TRAINERS:
        assert cell(found, "vllm", trainer).verdict.startswith("position_rule: ")
        traces = [Path(os.environ["MMPACK_MATRIX"]) / f"{name}.jsonl" for name in ("vllm", trainer)]
        report = mp.compare(*traces)
        assert {f.field for f in report.findings} <= {"processor", "media"}
        assert all(
            f.field != "media" or "same content and grid" in f.evidence for f in report.findings
        )
    versions = {name: made.split(",")[0] for name, made in found.frameworks.items()}
    for name in matrix.NAMES:
        assert versions[name].startswith(matrix.PACKAGES[name][2])
