"""The chain on a GPU: tiny models in both dtypes, two layers at real widths in bfloat16, the invariant mode, ranks."""

import json
import subprocess
import sys

import pytest
import torch
from chain.job import ONE_PROCESS, Options, chain
from chain.stages import STAGES

pytestmark = pytest.mark.gpu
MODELS = ["qwen2.5-vl", "qwen3-vl"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_tiny(model, dtype):
    report = chain(Options(model, dtype=dtype, device="cuda", axes=ONE_PROCESS))
    assert report.ok, list(report.lines())
    assert {row.stage for row in report.rows if not row.not_run} == set(STAGES)


@pytest.mark.alone  # 30 GB
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_real_widths(model):
    torch.cuda.reset_peak_memory_stats()
    axes = ["padding", "packed", "shared", "prefix_cache"]
    report = chain(Options(model, "layer", "bfloat16", "cuda", axes))
    assert report.ok, list(report.lines())
    assert report.seconds < 90 and torch.cuda.max_memory_allocated() < 60e9


@pytest.mark.parametrize("model", MODELS)
def test_invariant(model):
    axes = ["batch", "padding", "packed", "shared"]
    report = chain(Options(model, dtype="bfloat16", device="cuda", axes=axes, invariant=True))
    assert report.ok, list(report.lines())
    assert any(row.allowed == 0 for row in report.rows)


def over_ranks(ranks, out, *options, device="cuda"):
    """The document of the command under torchrun."""
    sizes = [word for n in (1, 2, 4) if n <= ranks for word in ("--tp", str(n))]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *launcher, "chain", "--device", device]
    done = subprocess.run(
        [*command, *sizes, *options, "--out", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(out.read_text())


@pytest.mark.alone  # all GPUs
@pytest.mark.parametrize("mode", [[], ["--invariant"]], ids=["plain", "invariant"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_by_nccl(ranks, mode, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    document = over_ranks(ranks, tmp_path / "chain.json", "--dtype", "bfloat16", *mode)
    assert document["ok"] and ("fsdp" in document["left_out"]) == bool(mode)
    split = [r for r in document["rows"] if r["axis"] == "tensor_parallel" and not r["not_run"]]
    assert {r["value"] for r in split} == {str(n) for n in (1, 2, 4) if n <= ranks}
    assert {r["stage"] for r in split} == set(STAGES)
    if mode:
        assert all(r["equal"] for r in split if r["direction"] != "weights")
    else:
        both = {r["stage"] for r in document["rows"] if r["axis"] == "tp 2 against fsdp 2"}
        assert {"logprob", "loss"} <= both
