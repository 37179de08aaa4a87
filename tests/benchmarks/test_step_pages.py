"""The pages of the step's rows: every figure in them is a row's."""

import json
from pathlib import Path

import pytest
from support.benchmarks import benchmark

from benchmarks.step.targets import targets

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {
    "padded": 27.6,
    "padded-tower": 12.0,
    "removed-padding": 10.6,
    "plain": 7.6,
    "shared": 4.0,
    "shared-compiled": 3.3,
}


def row(peer, seconds=None, workload="geo", **more):
    names = {"device": "GPU", "model": "qwen2.5-vl-7b", "workload": workload, "peer": peer}
    names |= {"ranks": 1, "options": {}}
    if seconds is None:
        return names | {"did_not_run": "out of memory"} | more
    figures = {"seconds": seconds, "first_seconds": seconds + 1, "peak_bytes": 50e9}
    figures |= {"rows": 32259, "patches": 16384, "tokens_per_second": 65859 / seconds}
    figures |= {"ideal_seconds": 2.8, "of_ideal": 2.8 / seconds}
    return names | figures | more


@pytest.fixture
def rows():
    return [row(p, s) for p, s in SECONDS.items()] + [
        row("padded", workload="video"),
        row("shared", 5.0, workload="video"),
    ]


def test_targets(rows):
    rows[4]["ideal_seconds"] = 1.98
    rows[3]["ideal_seconds"] = 3.77
    found = {target.what: target for target in targets(rows)}
    fast = found["shared-compiled as many times as fast as padded-tower"]
    assert fast.met and fast.found == pytest.approx(12.0 / 3.3) and fast.bound == 3.5
    assert found["shared to plain"].met
    ideal = next(t for what, t in found.items() if "ideals'" in what)
    assert ideal.met and ideal.found == pytest.approx((4.0 / 7.6) / (1.98 / 3.77))
    share = found["shared-compiled of its ideal"]
    assert not share.met and share.found == pytest.approx(2.8 / 3.3)
    assert targets([one | {"options": {"tiny": True}} for one in rows]) == []
    first = "seconds that the first step of shared takes more"
    assert found[first].found == pytest.approx(1) and found[first].met
    rows[4]["first_seconds"] = 9.0
    assert not next(t for t in targets(rows) if t.what == first).met
    rows[4]["compiled_in_first"] = 7  # not a machine that has run it before
    assert [t.where for t in targets(rows) if t.what == first] == ["qwen2.5-vl-7b video"]
    rows[4]["seconds"] = 7.7
    assert not next(t for t in targets(rows) if t.what == "shared to plain").met


def test_pages_without_a_row(tmp_path):
    """They name how to measure, and no figure."""
    made = benchmark("render").made(
        tmp_path, "before\n<!-- step: benchmarks/render.py -->\nold\n<!-- /step -->\nafter\n"
    )
    assert not any(path.suffix == ".svg" for path in made)
    readme = made[Path("README.md")]
    assert readme == "before\n<!-- step: benchmarks/render.py -->\n<!-- /step -->\nafter\n"
    assert "benchmarks.step" in made[Path("docs/performance.md")]


def test_pages_of_rows(rows, tmp_path):
    report = {"op": "step", "machines": {"GPU": {"torch": "2.11"}}, "rows": rows}
    report["rows"][4]["compiled_in_first"] = 7
    report["rows"][3]["compiled_in_first"] = 0
    report["rows"][4]["profile"] = {"products": 2.25, "idle": 0.125}
    (tmp_path / "step.json").write_text(json.dumps(report))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = benchmark("render").made(tmp_path, readme)
    headline = made[Path("README.md")].split("<!-- step")[1].split("<!-- /step")[0]
    assert "docs/speed.svg" in headline and "as verl does, with mmpack's attention" in " ".join(
        headline.split()
    )
    performance = made[Path("docs/performance.md")]
    assert "GPU, torch 2.11." in performance and "(../benchmarks/results/step.svg)" in performance
    assert "| 27.6 s | 12.0 s | 10.6 s | 7.60 s | 4.00 s | 3.30 s |" in performance
    every = made[Path("benchmarks/results/step.md")]
    assert every.index("(step.svg)") < every.index("| qwen2.5-vl-7b |")
    assert (
        every.count("| qwen2.5-vl-7b |") == len(rows) + 1 and "| `shared` | 2.25 | 0.12 |" in every
    )
    assert "| 4.00 | 5.00, compiles |" in every and "| 7.60 | 8.60 |" in every
    for name in ("docs/speed.svg", "benchmarks/results/step.svg"):
        for seconds in ("12.0 s", "3.30 s", "out of memory"):
            assert f">{seconds}</text>" in made[Path(name)]
