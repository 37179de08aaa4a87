"""A whole run of TRL's GRPO, stock and packed, at toy size; and the report that is made of runs."""

import json
import shutil
import statistics

import numpy as np
import pytest
from support.benchmarks import benchmark

pytest.importorskip("trl")
pytest.importorskip("datasets")
LEARN, RENDER = benchmark("learn"), benchmark("render")
TRAINERS = LEARN.TRAINERS


def options(monkeypatch, folder, *words):
    monkeypatch.setattr(
        "sys.argv", ["learn.py", "--parts", str(folder), "--work", str(folder), *words]
    )
    return LEARN.arguments()


@pytest.mark.slow
def test_both_trainers_learn_and_agree_on_the_same_rollouts(tmp_path, monkeypatch):
    args = options(
        monkeypatch, tmp_path, "--problems", "2", "--letters", "B", "--prompts", "2", "--rows", "8"
    )
    LEARN.make_start(args)
    steps = {}
    for name in TRAINERS:
        trainer, clock = LEARN.build(name, 0, 10, args)
        trainer.train()
        steps[name] = clock.steps
        for first in clock.steps[::2]:  # a generation each, and an optimizer step without one
            assert all(first[stage] > 0 for stage in LEARN.STAGES)
        for second in clock.steps[1::2]:
            assert (
                second["train"] > 0 == second["generation"] == second["old"] + second["reference"]
            )
        rewards = [step["reward"] for step in clock.steps[::2]]
        assert statistics.fmean(rewards[-2:]) >= rewards[0] + 0.25, rewards
    stats = trainer.mmpack_stats
    assert stats.patches * 4 < stats.patches_stock  # groups of eight met
    for k in range(2):  # of equal weights and seeds, so of the same rollouts
        stock, packed = (steps[name][k] for name in TRAINERS)
        assert stock["reward"] == packed["reward"] and stock["step"] != packed["step"]
        assert packed["loss"] == pytest.approx(stock["loss"], abs=1e-5 if k == 0 else 1e-3)
        assert packed["grad_norm"] == pytest.approx(
            stock["grad_norm"], rel=1e-4 if k == 0 else 0.05
        )


@pytest.fixture
def rewards():
    """By trainer and seed, of two generations."""
    return {
        "stock": [(0.2, 0.6), (0.3, 0.7), (0.25, 0.5)],
        "mmpack": [(0.2, 0.7), (0.1, 0.7), (0.3, 0.7)],
    }


@pytest.fixture
def folder(tmp_path, rewards):
    """Files of runs: of 4 steps each, and of 6 for the times."""
    made = tmp_path / "parts"
    made.mkdir()
    about = {"device": "GPU", "versions": {"trl": "1"}, "parameters": 94e6}
    about["settings"] = {"iterations": 2, "letters": "B", "rows": 8, "problems": 8, "prompts": 4}
    about["settings"] |= {"pixels": [100, 200], "supervised": 9}
    for name in TRAINERS:
        for seed, values in enumerate([*rewards[name], (0.5, 0.5, 0.5)]):
            steps = []
            for value in values:
                for first in (1, 0):
                    spent = {stage: float(first) for stage in LEARN.STAGES} | {"train": len(name)}
                    steps.append({"reward": value, "rest": 0.5, "step": 4.0 * first + 1} | spent)
            counted = {"tokens": 1, "tokens_stock": 4, "patches": 1, "patches_stock": 8}
            key = LEARN.ALONE if len(steps) == 6 else str(seed)
            part = {"trainer": name, "seed": key, "steps": steps}
            part["counted"] = counted if name == "mmpack" else None
            (made / f"{name}-{key}.json").write_text(json.dumps(about | part))
    return made


def call(monkeypatch, folder, *words):
    options(monkeypatch, folder, "--steps", "4", "--alone-steps", "6", *words)
    LEARN.main()


def test_a_report_of_runs(monkeypatch, tmp_path, folder, rewards):
    (tmp_path / "results").mkdir()
    # another page, which has a floor: the overview shows both
    shutil.copy(RENDER.RESULTS / "gather_rows.json", tmp_path / "results")
    call(monkeypatch, folder, "--out", str(tmp_path / "results" / "learn.json"))
    report = json.loads((tmp_path / "results" / "learn.json").read_text())
    stock, packed = (r for r in report["rows"] if r["section"] == "seconds a step")
    assert (stock["steps"], stock["step"], stock["old"], stock["train"]) == (2, 3.0, 0.5, 5)
    assert (packed["train"], packed["tokens_of_TRL"], packed["patches_of_TRL"]) == (6, 0.25, 0.125)
    both = {r["of"]: r for r in report["rows"] if r["section"] == "mean reward of both"}
    for name, of in {"first quarter": 0, "last quarter": 1}.items():
        a, b = (np.array(rewards[t])[:, of] for t in TRAINERS)
        bound = 2 * np.sqrt(a.var(ddof=1) / 3 + b.var(ddof=1) / 3)
        assert both[name]["two_standard_errors"] == pytest.approx(bound, rel=1e-3)
        assert both[name]["difference"] == pytest.approx(b.mean() - a.mean(), rel=1e-3)
        assert both[name]["within"] == (abs(b.mean() - a.mean()) <= bound)
    made = {str(path): text for path, text in RENDER.made(tmp_path / "results", README).items()}
    assert (
        "benchmarks/results/learn.svg" in made["README.md"] and "3 seeds, GPU" in made["README.md"]
    )
    assert ">6.00 s</text>" in made["benchmarks/results/learn.svg"]
    page = " ".join(made["benchmarks/results/learn.md"].split())
    assert "94 M weights" in page and "the right letter always B" in page


README = "<!-- step: benchmarks/render.py -->\n<!-- /step -->\n"


def test_a_run_that_is_missing_or_of_other_settings(monkeypatch, folder):
    (folder / "start").mkdir()
    ran = []
    monkeypatch.setattr(LEARN.subprocess, "run", lambda command, **_: ran.append(command[-2:]))
    for name in ("stock-1", "mmpack-0"):  # cut off
        part = json.loads((folder / f"{name}.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps(part | {"steps": part["steps"][:3]}))
    with pytest.raises(SystemExit, match="without mmpack 0, stock 1"):
        call(monkeypatch, folder)
    assert ran == [["mmpack", "0"], ["stock", "1"]]
    (folder / "stock-2.json").write_text(
        json.dumps(part | {"steps": part["steps"] * 2, "settings": {}})
    )
    with pytest.raises(SystemExit, match="other settings"):
        call(monkeypatch, folder, "--seeds", "2")
    with pytest.raises(SystemExit, match="steps that are timed"):
        call(monkeypatch, folder, "--seeds", "2", "--alone-steps", "0")
