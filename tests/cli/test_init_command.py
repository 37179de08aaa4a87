"""`mmpack init`: files that run, and none that is overwritten."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.process import call_mmpack

from mmpack.cli.init import NEXT, STARTERS, Framework

FILES = {
    "loop": ["train.py"],
    "trl": ["train.py"],
    "verl": ["data.py", "grpo.yaml", "reward.py", "run.sh"],
}


def start(folder, framework):
    result = call_mmpack("init", framework, folder)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def run(folder, *args):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("framework", FILES)
def test_files_are_written_once(tmp_path, framework):
    folder = tmp_path / "new" / "folder"
    wrote, step = start(folder, framework)
    assert wrote == "wrote " + ", ".join(str(folder / name) for name in FILES[framework])
    assert step.startswith("next: pip install") and str(folder) in step
    for name in FILES[framework]:
        assert (folder / name).read_bytes() == (STARTERS / framework / name).read_bytes()

    last = folder / FILES[framework][-1]
    for other in folder.iterdir():
        if other != last:
            other.unlink()
    last.write_text("mine")
    result = call_mmpack("init", framework, folder)
    assert result.returncode == 2 and "is there already. Fix: another DIR" in result.stderr
    assert last.read_text() == "mine" and list(folder.iterdir()) == [last]


def test_other_arguments_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call_mmpack("init", "keras").returncode == 2
    assert call_mmpack("init").returncode == 2
    Path("file").write_text("")
    result = call_mmpack("init", "loop", "file")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    document = json.loads(call_mmpack("init", "loop", "--json").stdout)
    assert document["files"] == ["train.py"] and Path("train.py").is_file()
    assert NEXT.keys() == set(Framework) == {path.name for path in STARTERS.iterdir()}


@pytest.mark.slow
def test_the_own_loop_trains(tmp_path):
    start(tmp_path, "loop")
    out = run(tmp_path, "train.py", "--steps", 2, "--prompts", 2, "--responses", 2)
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 0", "step 1"]
    assert all(float(line.rpartition(" ")[2]) > 0 for line in lines)  # gradient norms


@pytest.mark.slow
def test_the_trl_loop_trains(tmp_path):
    pytest.importorskip("trl")
    start(tmp_path, "trl")
    out = run(tmp_path, "train.py", "--steps", 1, "--responses", 4)  # of two the rewards are equal
    (norm,) = re.findall(r"'grad_norm': '?([0-9.e-]+)", out)
    assert float(norm) > 0 and re.search(r"^tokens +[0-9]+ +[0-9]+ ", out, re.MULTILINE)


def test_rows_of_verl_have_a_picture_for_each_mark(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    from mmpack.smoke import load_exercises

    start(tmp_path, "verl")
    run(tmp_path, "data.py")
    rows = [
        r for n in ("train", "test") for r in pq.read_table(tmp_path / f"{n}.parquet").to_pylist()
    ]
    exercises = load_exercises()
    assert len(rows) == len(exercises)
    names: dict = {}
    exec((tmp_path / "reward.py").read_text(), names)
    for row, exercise in zip(rows, exercises, strict=True):
        (message,) = row["prompt"]
        assert message["content"].count("<image>") == len(row["images"]) == len(exercise.images)
        truth = row["reward_model"]["ground_truth"]
        assert names["compute_score"]("drawn", f"{exercise.answer_letter}.", truth) == 1.0
        assert names["compute_score"]("drawn", "none", truth) == 0.0


@pytest.mark.verl
def test_verl_reads_the_config(tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    hydra = pytest.importorskip("hydra")
    import verl

    start(tmp_path, "verl")
    monkeypatch.setenv("MMPACK_STARTER", str(tmp_path))
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("grpo", overrides=["trainer.n_gpus_per_node=8"])
    assert config.actor_rollout_ref.model.external_lib == "mmpack.adapters.verl.enable"
    assert config.reward.custom_reward_function.path == str(tmp_path / "reward.py")
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n) == (8, 4)
    # every key that the file sets is one of verl's own
    defaults = Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"
    known = yaml.safe_load(defaults.read_text())
    mine = yaml.safe_load((tmp_path / "grpo.yaml").read_text())

    def unknown(given, of):
        for key, value in given.items():
            if key not in of:
                yield key
            elif isinstance(value, dict):
                yield from unknown(value, of[key] or {})

    del mine["hydra"], mine["defaults"]
    assert list(unknown(mine, known)) == []
