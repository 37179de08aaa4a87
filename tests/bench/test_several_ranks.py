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
    subprocess.run(command, check=True, cwd=FOLDER.parent, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    assert found["op"] == name and found["device"] == "CPU"
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
