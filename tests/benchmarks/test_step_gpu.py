"""The step's benchmark on a GPU: real shapes cut to two decoder layers. It measures time, so nothing runs beside it."""

import json

import pytest
import torch
from support.process import call_mmpack

from benchmarks.step.__main__ import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


PEERS = ["padded", "padded-tower-no-mask", "plain", "shared", "shared-compiled"]


@pytest.mark.parametrize("model", ["qwen2.5-vl-3b", "qwen3-vl-8b"])
def test_peers_are_right_and_timed(model, tmp_path):
    out = tmp_path / "step.json"
    peers = [option for peer in PEERS for option in ("--peer", peer)]
    args = [*peers, "--model", model, "--workload", "geo", "--layers", "2", "--repeats", "2"]
    args += ["--out", out]
    done = call_mmpack(*args, main=main)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["peer"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == PEERS
    for row in rows.values():
        assert 0 < row["of_ideal"] < 1 and row["peak_bytes"] > 1e9
        assert row["product_flops_per_second"] > 1e13
    assert rows["shared"]["rows"] < rows["plain"]["rows"] < rows["padded"]["rows"]
    assert rows["shared"]["seconds"] < rows["plain"]["seconds"]


def test_a_profile_adds_up(tmp_path):
    out = tmp_path / "step.json"
    args = ["--model", "qwen2.5-vl-3b", "--workload", "geo", "--layers", "2", "--peer", "shared"]
    done = call_mmpack(*args, "--profile", "--out", out, main=main)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    found = row["profile"]
    assert {"products", "attention", "head", "elementwise", "copies", "tower", "idle"} <= set(found)
    assert sum(found.values()) == pytest.approx(row["seconds"], rel=0.5)
    assert found["products"] > 0 and found["tower"] > 0
