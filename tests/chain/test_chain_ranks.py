"""The chain on several ranks: tensor-parallel and FSDP2 beside one process, by gloo on the CPU, and by NCCL."""

import json
import subprocess
import sys

import pytest
import torch
from chain.job import Options, chain
from chain.stages import STAGES

TP = "tensor_parallel"


@pytest.mark.slow
@pytest.mark.adapter
def test_two_ranks_beside_one_process():
    """Qwen3-VL, whose norms of queries and keys have one weight for the heads of all ranks."""
    report = chain(Options("qwen3-vl", layers=1, axes=[TP, "fsdp"], tp=(1, 2)))
    assert report.ok, list(report.lines())
    rows = {(r.axis, r.value, r.stage, r.kind or r.direction): r for r in report.rows}
    assert rows["fsdp", "2", "tower", "visual.blocks.*.attn.qkv.weight[q]"].within
    for ranks in ("1", "2"):
        for stage in STAGES:
            for direction in ("forward", "backward"):
                assert not rows[TP, ranks, stage, direction].not_run, (ranks, stage, direction)
    # what is not split is what it was
    assert all(
        rows[TP, "2", s, "forward"].equal for s in ("tower", "projector", "embedding", "merge")
    )
    assert not rows[TP, "2", "o", "forward"].equal  # sums of other parts
    assert rows[TP, "2", "rms_norm", "weights"].within
    for axis, value in (("fsdp", "2"), ("tp 2 against fsdp 2", "")):
        assert {key[2] for key in rows if key[:2] == (axis, value) and key[3] == "forward"} == {
            "logprob", "ratio", "kl", "loss",
        }  # fmt: skip
        assert (axis, value, "mlp", "weights") in rows


@pytest.mark.slow
def test_four_ranks():
    report = chain(Options("qwen3-vl", axes=[TP, "fsdp"]))
    assert report.ok, list(report.lines())
    assert {r.value for r in report.rows if r.axis == TP} == {"1", "2", "4"}


@pytest.mark.slow
def test_one_tree_for_any_number_of_ranks():
    """Within the invariant mode 1, 2 and 4 ranks give the same bits at every stage, forward and backward."""
    report = chain(Options("qwen2.5-vl", axes=[TP], invariant=True))
    assert report.ok, list(report.lines())
    rows = [r for r in report.rows if r.axis == TP and r.direction != "weights" and not r.not_run]
    assert {r.axis for r in report.rows} == {"alone", TP}
    assert len(rows) == 3 * 2 * len(STAGES) and all(r.equal and r.allowed == 0 for r in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_gpus(tmp_path, ranks, dtype):
    """Under torchrun, over NCCL."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    asked = f"--device cuda --dtype {dtype} --axis sequence_parallel --axis fsdp --tp {ranks}"
    out = tmp_path / "chain.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "chain"]
    subprocess.run([*command, *asked.split(), "--json", "--out", str(out)], check=True)
    report = json.loads(out.read_text())
    assert report["ok"] and not report["left_out"]
    split = {(r["axis"], r["value"]) for r in report["rows"] if r["direction"] == "backward"}
    assert {(TP, str(ranks)), ("sequence_parallel", str(ranks))} <= split
