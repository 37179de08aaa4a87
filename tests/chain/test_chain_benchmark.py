"""benchmarks/chain.py: what it makes of the command's rows, and of runs that fail; its chart and table."""

import json
import sys
from dataclasses import dataclass

import pytest
from chain.job import Options
from chain.job import chain as run_chain
from support.benchmarks import benchmark

BENCH, RENDER = benchmark("chain"), benchmark("render")
draw, charts = sys.modules["charts.draw"], sys.modules["charts"]


@pytest.fixture(scope="module")
def document():
    return run_chain(Options(axes=["packed"], layers=1)).to_dict()


@pytest.mark.slow
def test_a_cell_is_the_worst_of_its_axis(document):
    made = {(r["stage"], r["pass"], r["kind"] or ""): r for r in BENCH.by_stage(document["rows"])}
    assert ("tower", "weights", "visual.blocks.*.attn.qkv.weight[q]") in made
    for key, row in made.items():
        assert [*row] == ["stage", "pass", "kind", "alone", "packed"]
        own = [r for r in document["rows"] if (r["stage"], r["direction"], r["kind"]) == key]
        packed = [r for r in own if r["axis"] == "packed"]  # in order, reversed
        assert len(packed) == 2
        if all(r["max_difference"] == 0 for r in packed):
            assert row["packed"] == "equal"
            continue
        assert row["packed"] == {
            "diff": max(r["max_difference"] for r in packed),
            "ulps": max(r["peak_ulps"] for r in packed),
            "of bound": max(r["error"] / r["allowed"] for r in packed),
        }
        assert 0 < row["packed"]["of bound"] <= 1
    assert made["embedding", "forward", ""]["packed"] == "equal"


@dataclass
class Stub:
    """A run that writes the document, as the command does with `--out`; or fails."""

    name: str
    ranks: int
    document: str = ""
    code: int = 0

    def command(self, out):
        text = (
            f"import sys; open({str(out)!r}, 'w').write({self.document!r}); sys.exit({self.code})"
        )
        if self.code not in (0, 1):
            text = "import sys; print('no such card', file=sys.stderr); sys.exit(7)"
        return [sys.executable, "-c", text]


@pytest.mark.slow
def test_runs_and_their_rows(document, tmp_path):
    beyond = json.loads(json.dumps(document))
    beyond["rows"][3]["within"] = False
    runs = [
        Stub(BENCH.Run("qwen2.5-vl", False, 1).name, 1, json.dumps(document)),
        Stub(BENCH.Run("qwen2.5-vl", True, 1).name, 1, json.dumps(beyond), code=1),
        Stub(BENCH.Run("qwen3-vl", False, 4).name, 4, code=7),
    ]
    (tmp_path / "2-4.json").write_text(
        json.dumps(document)
    )  # an earlier call's, and not this run's
    rows = BENCH.measured(runs, tmp_path, 2, 1)
    counts = [row for row in rows if row["section"] == "runs"]
    assert [row.get("beyond") for row in counts] == [0, 1, None]
    total = len(document["rows"])
    assert all(r["equal"] + r["bounded"] + r["beyond"] == r["rows"] == total for r in counts[:2])
    assert [row.get("device") for row in counts] == ["cpu", "cpu", None]
    assert all(row["torch"] == document["setting"]["torch"] for row in counts[:2])
    assert counts[2]["did_not_run"] == "no such card" and counts[2]["run"] == "Qwen3-VL, 4 ranks"

    report = {
        "op": "chain",
        "device": "a GPU",
        "versions": {"torch": "2", "transformers": "5"},
        "rows": rows,
    }
    assert "| Qwen2.5-VL, invariant |" in RENDER._chain(report) and "4 ranks" not in RENDER._chain(
        report
    )
    assert "Qwen3-VL, 4 ranks did not run: no such card" in RENDER._tables(report)
    [group] = charts.CHARTS["chain"](report).panels[0].groups
    worst = next(r for r in rows if (r.get("stage"), r.get("pass")) == ("logprob", "forward"))
    assert [bar.label for bar in group.bars][1:] == ["plain", "batch-invariant"]
    assert group.bars[1].value == worst["packed"]["diff"] > 0
    assert draw.svg(charts.CHARTS["chain"](report)).startswith("<svg")


def test_other_sections_of_the_file_stay(tmp_path):
    """A run that names no place gets that of the file's head, which the next one replaces."""
    path = tmp_path / "chain.json"
    first = [{"section": "runs", "run": "A", "rows": 1}, {"section": "A", "stage": "o"}]
    head = {"device": "an old card", "command": "python chain.py"}
    head["versions"] = {"torch": "2", "transformers": "5"}
    path.write_text(json.dumps(head | {"rows": first}))
    there = head["versions"] | {"device": "a new card"}
    new = [{"section": "runs", "run": "B", "rows": 2} | there, {"section": "B", "stage": "o"}]
    old = first[0] | head["versions"] | {"device": "an old card", "command": "python chain.py"}
    assert BENCH.merged(path, new) == [old, new[0], first[1], new[1]]
    other = {"device": "a new card", "command": "python chain.py --at-once 2"}
    path.write_text(json.dumps(head | other | {"rows": [old, first[1]]}))
    assert BENCH.merged(path, new) == [old, new[0], first[1], new[1]]
    again = [{"section": "runs", "run": "A", "rows": 3}]
    assert BENCH.merged(path, again) == again
    assert BENCH.merged(tmp_path / "none.json", new) == new


def counts_of(run, **place):
    numbers = {"rows": 9, "equal": 4, "bounded": 5, "beyond": 0}
    return {"section": "runs", "run": run, **numbers, **place}


def test_a_page_of_runs_on_two_kinds_of_cards():
    rows = [
        counts_of("A", device="an old card", torch="2", transformers="5"),
        counts_of("B"),
        counts_of("C", device="an old card", torch="2", transformers="5"),
        *({"section": run, "stage": "o", "pass": "forward", "alone": "equal"} for run in "ABC"),
    ]
    versions = {"torch": "3", "transformers": "6"}
    report = {"op": "chain", "device": "a new card", "versions": versions, "floors": {}}
    report |= {"command": "x", "rows": rows}
    said = RENDER._chain(report)
    old = said.index("On an old card (torch 2, transformers 5)")
    new = said.index("On a new card (torch 3, transformers 6):")
    a, b, c = (said.index(f"| {run} | `alone` | 9 |") for run in "ABC")
    assert old < a < c < new < b
    assert said.count("benchmarks/results/chain.md") == 1
    assert RENDER._ran(report).startswith("a new card, an old card, torch 3")


def test_at_most_so_many_runs_at_once(tmp_path):
    """Two on one GPU, then one on each of two."""
    for cards, used in ((1, {"0"}), (2, {"0", "1"})):
        runs = [Waiting(f"{cards}-{i}", tmp_path) for i in range(4)]
        BENCH.measured(runs, tmp_path, 2, cards)
        times = [json.loads((tmp_path / f"{run.name}.txt").read_text()) for run in runs]
        assert {card for _, _, card in times} == used
        for begun, _, _ in times:
            assert sum(start <= begun < end for start, end, _ in times) <= 2
        assert any(a[0] < b[1] and b[0] < a[1] for a in times for b in times if a is not b)


@dataclass
class Waiting:
    """A run that waits, and writes when it ran and on which GPU."""

    name: str
    folder: object
    ranks: int = 1

    def command(self, out):
        code = (
            "import json, os, time; begun = time.time(); time.sleep(1); "
            f"where = {str(self.folder / self.name)!r} + '.txt'; "
            "at = [begun, time.time(), os.environ['CUDA_VISIBLE_DEVICES']]; "
            "open(where, 'w').write(json.dumps(at))"
        )
        return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    "args, said", [(["--at-once", "2"], "there is no GPU"), (["--at-once", "0"], "2")]
)
def test_without_a_gpu_nothing_is_written(args, said, monkeypatch, tmp_path):
    monkeypatch.setattr(BENCH.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["chain.py", *args, "--out", str(tmp_path / "chain.json")])
    with pytest.raises(SystemExit) as stopped:
        BENCH.main()
    assert said in str(stopped.value) and not [*tmp_path.iterdir()]


def test_a_run_says_its_axes():
    """The table names what was compared, and the chart's title no more than that."""
    rows = [
        {"section": "runs", "run": "A", "rows": 2, "equal": 1, "bounded": 1, "beyond": 0},
        {"section": "A", "stage": "logprob", "pass": "forward", "alone": "equal",
         "tensor_parallel 1": "equal", "tensor_parallel 2": "equal", "fsdp": None},
    ]  # fmt: skip
    report = {"op": "chain", "device": "a GPU", "versions": {"torch": "2", "transformers": "5"}}
    table = RENDER._chain(report | {"rows": rows})
    assert "| A | `alone`, `tensor_parallel` 1, 2, `fsdp` | 2 | 1 | 1 | 0 |" in table
    assert charts.CHARTS["chain"]({"rows": rows}).title.endswith("between ranks?")
    rows[1]["packed"] = "equal"
    assert charts.CHARTS["chain"]({"rows": rows}).title.endswith("between layouts and ranks?")


def test_what_is_run():
    command = BENCH.Run("qwen3-vl", True, 4).command("x.json")
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    assert command[-7:] == ["--tp", "1", "--tp", "2", "--tp", "4", "--invariant"]
    assert "--tp" not in BENCH.Run("qwen3-vl", False, 1).command("x.json")
