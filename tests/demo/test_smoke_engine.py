"""The main job with a real engine as the rollout, and the control group: one cause put in, drift shown and named."""

import io
import json
from itertools import product

import pytest
from rich.console import Console
from support.engines import checkpoint, shared_engine
from support.process import run_mmpack

from mmpack.contracts import TOLERANCES
from mmpack.demo.options import SmokeOptions
from mmpack.demo.report import Report
from mmpack.demo.run import run

pytestmark = pytest.mark.engine

SMALL = {"limit": 2, "n": 2, "max_new_tokens": 8}
MAX = TOLERANCES["engines_max"].value


def smoke(**options) -> Report:
    job = SmokeOptions(engine="vllm", model=checkpoint(), **options)
    return run(job, Console(file=io.StringIO()), make_engine=shared_engine)


def within_bounds(drift) -> bool:
    return (
        drift["max_abs"] <= MAX
        and drift["mean_abs"] <= TOLERANCES["engines_mean"].value
        and drift["k3"] <= TOLERANCES["engines_k3"].value
    )


def test_the_command_does_the_whole_job():
    """Its standard output is one document, whatever the engine prints."""
    small = ("--limit", "4", "--n", "4", "--max-new-tokens", "16", "--model", checkpoint())
    sampler = ("--temperature", "0.8", "--top-p", "0.9")
    done = run_mmpack("smoke", "--engine", "vllm", *small, *sampler, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    values = json.loads(done.stdout)
    assert values["failed"] == [] and values["parity"] == {"ok": True, "compared": 20}
    for name in ("drift", "drift after the step"):
        assert values[name]["tokens"] >= 200 and within_bounds(values[name])
        assert values[name]["argmax_differs"] == 0.0 and values[name]["causes"] == {}
    assert values["weights"]["unlike"] == [] and values["weights"]["tensors"] > 50
    kept = values["kept_ids"]
    assert kept["max_abs_diff"] <= MAX and abs(kept["ratio"] - 1) <= 1e-4
    assert kept["ratio_over_all_ids"] < 0.95 and 1 < kept["ids_per_token"] <= 1024
    rows = values["engines"]
    ways = {(r["prefix_cache"], r["chunked_prefill"] is None, r["batch"] == 1) for r in rows}
    assert len(rows) == len(ways) == 8
    for row in rows:
        assert row["ok"] and within_bounds(row)
        assert (sum(row["prefix_cached_tokens"]) > 0) == row["prefix_cache"]
        assert row["media_cache_hits"] == 0 or row["media_cache"]
    again = [r for r in rows if r["batch"] == 1]  # the prompts of the row before
    assert [r["media_cache_hits"] > 0 for r in again] == [r["media_cache"] for r in again]
    assert {(r["media_cache"], r["prefix_cache"]) for r in rows} == set(product((0, 1), repeat=2))


@pytest.mark.parametrize("cause", ["max_pixels", "position_rule"])
def test_a_cause_of_the_layout_is_named_by_parity_and_its_drift_shows(cause, tmp_path):
    import mmpack as mp

    report = smoke(**SMALL, inject=cause, workdir=tmp_path)
    assert report.failed == ["parity", "drift"] and report.exit_code == 1
    assert report.values["first"]["cause"] == cause
    assert not within_bounds(report.values["drift"])
    assert "loss" not in report.values  # no step is taken
    if cause == "position_rule":  # of a video, named for both sides
        found = mp.compare(tmp_path / "rollout.jsonl", tmp_path / "train.jsonl").findings
        found = [f for f in found if f.field == "position_ids"]
        assert {f.sample_id for f in found} == {"clip-1/0", "clip-1/1"}
        assert all("rollout follows `max`, train follows `grid`" in f.evidence for f in found)


def test_a_stale_tensor_is_named():
    report = smoke(**SMALL, inject="stale_weights")
    assert report.failed == ["weights", "drift after the step"]
    [name] = report.values["weights"]["unlike"]
    assert name.endswith("layers.1.mlp.down_proj.weight")
    drift = report.values["drift after the step"]
    assert drift["max_abs"] > 10 * report.values["drift"]["max_abs"]
    assert set(drift["causes"]) == {"stale_weights"} and name in drift["causes"]["stale_weights"]


def test_another_dtype_is_named():
    """It drifts, and rounds the seconds of a clip."""
    report = smoke(**SMALL, inject="dtype")
    assert report.failed == ["parity", "drift"] and report.values["drift"]["max_abs"] > MAX
    first = report.values["first"]
    assert first["cause"] == "second_per_grid_ts"
    assert "rollout's engine casts it to bfloat16" in first["message"]
    assert set(report.values["drift"]["causes"]) == {"dtype"}
    assert "bfloat16" in report.values["drift"]["causes"]["dtype"]
