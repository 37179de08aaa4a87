"""The benchmarks of several GPUs, small and by gloo on the CPU: what they check holds, charts draw their rows."""

import json
import subprocess
import sys

import pytest
from support.benchmarks import FOLDER, benchmark

pytestmark = pytest.mark.slow
RENDER = benchmark("render")


def report(name, tmp_path):
    out = tmp_path / f"{name}.json"
    command = [sys.executable, FOLDER / f"{name}.py", "--tiny", "--ranks", "2", "--out", out]
    run = subprocess.run(command, check=True, cwd=FOLDER.parent, capture_output=True, text=True)
    found = json.loads(out.read_text())
    assert found["op"] == name and found["device"] == "CPU"
    said = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{")]
    assert len(said) == len(found["rows"])  # as soon as measured, before what compares rows
    assert all(row.items() <= whole.items() for row, whole in zip(said, found["rows"], strict=True))
    return found


def test_sequence_parallel(tmp_path):
    found = report("sequence_parallel", tmp_path)
    for one, two in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert (one["ranks"], two["ranks"]) == (1, 2) and one["pack"] == two["pack"]
        for row in (one, two):  # of float32, beside float64
            assert 0 < row["gradient_error"] < 1e-5 and 0 < row["logprob_error_rms"] < 1e-5
            row |= {"peak_bytes": 3e9, "beyond_weights_bytes": 2e9}  # those of a GPU
    drawn = RENDER.draw.svg(RENDER.CHARTS["sequence_parallel"](found))
    assert drawn.count("2 GPUs") == 2 * len(found["rows"]) // 2


def test_encode_together(tmp_path):
    found = report("encode_together", tmp_path)
    rows = {(r["section"], r["how"], r["way"]): r for r in found["rows"]}
    assert len(rows) == 2 * 2 * 3
    for how in ("FSDP2", "DistributedDataParallel"):
        come, planned, together = (
            rows["all pictures in one sample", how, way]
            for way in ("as they come", "planned", "pictures encoded together")
        )
        # no plan can divide the pictures of a sample, the exchange does
        assert come["patches_most"] == planned["patches_most"] > 1.9 * planned["patches_mean"]
        assert together["patches_most"] == together["patches_mean"]
        quarter = rows["pictures in a quarter of the samples", how, "pictures encoded together"]
        assert quarter["patches_most"] <= 1.5 * quarter["patches_mean"]
    assert RENDER.draw.svg(RENDER.CHARTS["encode_together"](found)).count("as they come") == 4


def test_linear_selected_logprobs_ranks(tmp_path):
    found = report("linear_selected_logprobs_ranks", tmp_path)
    named = [(row["ranks"], row["name"]) for row in found["rows"]]
    assert named == [(n, f"mmpack {how}") for n in (1, 2) for how in ("recompute", "stored")]
    one, two = found["rows"][0], found["rows"][2]
    assert two["speed_up"] == pytest.approx(one["both_ms"] / two["both_ms"], rel=1e-3)
    chart = RENDER.CHARTS["linear_selected_logprobs_ranks"]
    assert RENDER.draw.svg(chart(found)).startswith("<svg")
