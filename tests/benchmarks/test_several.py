"""benchmarks/several.py without a GPU: rows are printed, and written only where `--out` says."""

import json
import sys

import pytest
import torch
from support.benchmarks import benchmark

BENCHMARKS = ["sequence_parallel", "encode_together", "linear_selected_logprobs_ranks"]


@pytest.fixture(params=BENCHMARKS)
def main(request, monkeypatch, tmp_path):
    """The benchmark's, whose processes give one row; what it writes by itself would be in tmp_path / "results"."""
    module = benchmark(request.param)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(sys.modules["gpu"], "RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def spawn(_, arguments, nprocs):
        ranks, folder, work, _ = arguments
        assert ranks == nprocs == 2 and work is module.measure
        (tmp_path / folder / "rows.json").write_text(json.dumps([{"seconds": 0.123456}]))

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [f"{request.param}.py", "--tiny", "--ranks", "2", *words])
        module.main()

    return run


def test_a_named_file_is_written(main, tmp_path):
    main("--out", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["device"] == "CPU" and report["rows"] == [{"seconds": 0.1235}]
    assert [*(tmp_path / "results").iterdir()] == []
