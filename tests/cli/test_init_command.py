"""`mmpack init`: files that run, and none that is overwritten."""

import asyncio
import base64
import io
import json
import os
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from PIL import Image
from support.process import call_mmpack, refused

from mmpack.cli.init import NEXT, STARTERS, Framework

FILES = {
    "loop": ["train.py"],
    "trl": ["train.py"],
    "verl": ["data.py", "grpo.yaml", "reward.py", "run.sh"],
    "openrlhf": ["data.py", "reward.py", "run.sh"],
    "vime": ["data.py", "reward.py", "run.sh"],
}


def source(framework, name):
    own = STARTERS / framework / name
    return own if own.exists() else STARTERS / "rows" / name


def start(folder, framework):
    result = call_mmpack("init", framework, folder)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def started_command(folder, program, *args, **environment):
    """The arguments that run.sh hands to `program`, of which a stand-in comes first in PATH and only prints them."""
    stand_in = folder / "bin" / program
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **{k: str(v) for k, v in environment.items()}}
    command = ["bash", str(folder / "run.sh"), *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
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
        assert (folder / name).read_bytes() == source(framework, name).read_bytes()

    for name in FILES[framework][:-1]:
        (folder / name).unlink()
    last = folder / FILES[framework][-1]
    last.write_text("mine")
    refused("init", framework, folder, parts=["is there already. Fix: name another DIR"])
    assert last.read_text() == "mine" and list(folder.iterdir()) == [last]


def test_other_arguments_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    for args in (("keras",), (), ("loop", "file")):
        refused("init", *args)
    document = json.loads(call_mmpack("init", "loop", "--json").stdout)
    assert document["files"] == ["train.py"] and Path("train.py").is_file()
    folders = {path.name for path in STARTERS.iterdir()}
    assert NEXT.keys() == set(get_args(Framework)) == folders - {"rows"}


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
    from mmpack.demo import load_exercises

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


def test_rows_in_lines_have_a_picture_for_each_mark(tmp_path):
    from mmpack.demo import load_exercises

    start(tmp_path, "vime")
    runpy.run_path(str(tmp_path / "data.py"))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    exercises = load_exercises()
    for row, exercise in zip(rows, exercises, strict=True):
        assert row["input"].count("<image>") == len(row["images"]) == len(exercise.images)
        assert row["label"] == exercise.answer_letter
        for text, image in zip(row["images"], exercise.images, strict=True):
            kind, _, encoded = text.partition(",")
            assert kind == "data:image/png;base64"
            with Image.open(io.BytesIO(base64.b64decode(encoded))) as own:
                assert np.array_equal(np.asarray(own), np.asarray(image))


@pytest.mark.openrlhf
def test_openrlhf_reads_command_rows_and_reward(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from support.openrlhf_parts import stand_ins, strategy_of

    from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model

    tiny_model("qwen2_5_vl").save_pretrained(tmp_path / "model")
    start(tmp_path, "openrlhf")
    runpy.run_path(str(tmp_path / "data.py"))
    _, module, *options = started_command(tmp_path, "python", MODEL=tmp_path / "model")
    strategy = strategy_of(module, *options)
    args = strategy.args
    assert type(strategy).__name__ == "MmpackStrategy"
    assert args.train.batch_size == args.rollout.batch_size * args.rollout.n_samples_per_prompt
    with stand_ins():
        from openrlhf.datasets import PromptDataset
        from openrlhf.datasets.utils import blending_datasets
        from openrlhf.utils.agent import SingleTurnAgentExecutor
        from openrlhf.utils.vlm_utils import process_prompt_with_images
    strategy.is_rank_0 = lambda: True
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = blending_datasets(args.data.prompt_dataset, None, strategy)
    processor = qwen_vl_processor("qwen2_5_vl", max_pixels=64 * 28 * 28)
    prompts = PromptDataset(rows, processor, strategy)
    reward = SingleTurnAgentExecutor(args.reward.remote_url).reward_func
    for number, exercise in enumerate(load_exercises(limit=3)):
        _, prompt, label, images = prompts[number]
        assert prompt.endswith("<|im_start|>assistant\n") and label == exercise.answer_letter
        _, inputs, loaded = process_prompt_with_images(processor, prompt, images)
        assert len(inputs["image_grid_thw"]) == len(loaded) == len(exercise.images)
        for answer, value in ((f"{label}<|im_end|>", 1.0), ("none", 0.0)):
            got = reward([prompt + answer], [prompt], [label])
            assert float(got["rewards"]) == float(got["scores"]) == value


def test_the_command_for_vime(tmp_path):
    start(tmp_path, "vime")
    (tmp_path / "train.jsonl").write_text("")
    model = tmp_path / "vime/scripts/models/qwen3-4B.sh"
    model.parent.mkdir(parents=True)
    model.write_text("MODEL_ARGS=(--num-layers 36 --rotary-base ${MODEL_ARGS_ROTARY_BASE})")
    where = {"VIME_DIR": tmp_path / "vime", "MEGATRON_DIR": tmp_path, "MODEL": "/a/model"}
    words = started_command(tmp_path, "ray", "--lr", "1e-5", **where)
    separator = words.index("--")
    assert words[:2] == ["job", "submit"] and words[separator + 1 : separator + 3] == [
        "python3",
        "train.py",
    ]
    [environment] = [w for w in words[:separator] if w.startswith("--runtime-env-json=")]
    variables = json.loads(environment.partition("=")[2])["env_vars"]
    assert variables["PYTHONPATH"].startswith(f"{tmp_path}:")  # where reward.score is
    options = words[separator + 3 :]
    named = dict(pairwise(options))
    assert named["--custom-megatron-init-path"] == "mmpack.adapters.vime.enable"
    assert named["--rotary-base"] == "5000000" and options[-2:] == ["--lr", "1e-5"]
    assert json.loads(named["--multimodal-keys"]) == {"image": "images"}
    module, _, name = named["--custom-rm-path"].rpartition(".")
    score = runpy.run_path(str(tmp_path / f"{module}.py"))[name]
    for response, value in (("B. so", 1.0), ("none", 0.0)):
        sample = SimpleNamespace(response=response, label="B")
        assert asyncio.run(score(None, sample)) == value
        assert asyncio.run(score(None, [sample] * 2)) == [value] * 2
