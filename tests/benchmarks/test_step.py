"""`python -m benchmarks.step` on the CPU, with tiny models: what it writes, what it skips, what it refuses."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from support.process import call_mmpack

from benchmarks.step import agreement
from benchmarks.step.__main__ import main
from benchmarks.step.peers import PEERS
from benchmarks.step.step import Options, case_of
from mmpack.errors import installed_version

CPU = torch.device("cpu")
NAME = "qwen2.5-vl-7b"


def bench(*args):
    return call_mmpack("--tiny", "--repeats", "2", "--model", NAME, *args, main=main)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The file after padded and shared, and what was printed."""
    out = tmp_path_factory.mktemp("bench") / "step.json"
    args = ["--workload", "geo", "--peer", "padded", "--peer", "shared", "--out", out]
    return out, args, bench(*args)


@pytest.mark.slow
def test_a_report(report):
    out, _, done = report
    assert done.returncode == 0, done.stderr
    padded, shared = json.loads(out.read_text())["rows"]
    assert (padded["peer"], shared["peer"]) == ("padded", "shared")
    assert padded["tokens"] == shared["tokens"] and padded["loss_tokens"] == shared["loss_tokens"]
    # two prompts of 200 tokens and one picture, three responses each
    assert shared["rows"] == shared["tokens"] - 2 * 2 * 200 and padded["rows"] > padded["tokens"]
    assert (padded["patches"], shared["patches"]) == (6 * 144, 2 * 144)
    for row in (padded, shared):
        assert row["of_ideal"] == pytest.approx(row["ideal_seconds"] / row["seconds"], rel=1e-3)
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"], rel=1e-3)
        assert row["first_seconds"] > 0 and row["peak_bytes"] is None
    assert padded["error"] == padded["padded_error"] == shared["padded_error"]
    for row in (padded, shared):  # float32 beside float64
        assert 0 < row["error"]["gradients"] < 1e-5 and 0 < row["error"]["logprobs"] < 1e-5


def planted(monkeypatch, forward):
    monkeypatch.setitem(PEERS, "plain", dataclasses.replace(PEERS["plain"], forward=forward))


@pytest.mark.slow
def test_memory_that_runs_out_is_a_row(monkeypatch, tmp_path):
    def full(model, job, members):
        raise torch.OutOfMemoryError("CUDA out of memory")

    planted(monkeypatch, full)
    out = tmp_path / "step.json"
    done = bench("--workload", "geo", "--peer", "plain", "--out", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert done.returncode == 0 and row["did_not_run"] == "out of memory"


@pytest.mark.slow
def test_a_wrong_peer_is_not_timed(monkeypatch, tmp_path):
    right = PEERS["plain"].forward

    def wrong(model, job, members):
        outcome = right(model, job, members)
        return dataclasses.replace(outcome, loss=outcome.loss * 1.001)

    planted(monkeypatch, wrong)
    out = tmp_path / "step.json"
    done = bench("--workload", "geo", "--peer", "plain", "--out", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert done.returncode == 1 and "seconds" not in row
    assert row["error"]["gradients"] == pytest.approx(1e-3, rel=0.01)
    assert "results are wrong: errors gradients 0.001, " in done.stdout


def test_usage(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"op": "rewards", "rows": []}')
    for args, why in (
        (["--peer", "padding"], "one of padded, "),
        (["--workload", "maths"], "one of geo, "),
        (["--out", other], "not a report of this benchmark"),
        (["--fsdp"], "torchrun"),
    ):
        done = bench("--workload", "geo", "--peer", "plain", *args)
        assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1


def cannot_run(name):
    peer = PEERS[name]
    return peer.package is not None and installed_version(peer.package) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PEERS if n != "padded"])
@pytest.mark.parametrize("workload", ["geo", "video"])
def test_peers_compute_one_thing(name, workload, held):
    if cannot_run(name):
        pytest.skip(f"{PEERS[name].package} is not installed")
    case = held(workload)
    want, allowed = case.hold_to()
    model = case.build()
    with PEERS[name].prepared(model):
        found = agreement.result(model, case.job, PEERS[name])
    assert agreement.distance(found, want).beyond(allowed, torch.float32) == []


@pytest.fixture(scope="module")
def held():
    cases = {}

    def case(workload):
        if workload not in cases:
            options = Options([NAME], [workload], [], tiny=True)
            cases[workload] = case_of(options, NAME, workload, CPU)
        return cases[workload]

    return case


@pytest.mark.slow
def test_two_ranks(tmp_path):
    out = tmp_path / "step.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.step", "--fsdp", "--tiny", "--repeats=2", "--profile"]
    command += [f"--model={NAME}", "--workload=geo", "--peer=shared", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ranks"] == 2 and row["patches"] == 2 * 144
    assert row["rows"] == row["tokens"] - 2 * 2 * 200
