"""The code of docs/trl.md runs; AsyncGRPOTrainer itself: tests/adapters/test_trl_async.py."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny_models import tiny_qwen2_5_vl
from test_docs_run import blocks, run
from transformers import TrainingArguments

from mmpack.adapters.trl import MmpackGRPO
from mmpack.adapters.trl.async_grpo import SampleWorker

pytest.importorskip("trl")
from support.trl_trainers import datasets, reward, rows_of, small_processor, trl

PAGE = "docs/trl.md"
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
pytestmark = pytest.mark.slow


def part(word):
    [code] = [block for block in blocks(PAGE) if word in block[1]]
    return [code]


def test_grpo_and_its_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = rows_of((0,))
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    names = {
        "model": tiny_qwen2_5_vl(),
        "reward": reward,
        "args": trl.GRPOConfig("out", **settings),
        "dataset": datasets.Dataset.from_list(rows),
        "hf_processor": small_processor(),
    }
    ran = run(PAGE, names, part("PackedTrainer(  #"))
    assert isinstance(ran["trainer"], MmpackGRPO) and ran["trainer"].mmpack_stats.passes > 0
    ran = run(PAGE, {"trainer": ran["trainer"], "rows": rows * 4}, part("loss_columns"))
    assert len(ran["samples"]) == 4 and ran["batch"].num_loss_tokens > 0
    columns = ran["outputs"].keys()
    assert {"prompt_ids", "completion_ids", "pixel_values", "advantages"} <= columns


def test_asynchronous():
    engine = SimpleNamespace(rollout=lambda: ["a group"])
    ran = run(PAGE, {"engine": engine}, part("SampleWorker"))
    assert isinstance(ran["worker"], SampleWorker) and next(ran["rollouts"](0)) == ["a group"]


def test_supervised(tmp_path):
    import stock_step
    from trainer_policy import samples_of

    model = tiny_qwen2_5_vl()
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    args.remove_unused_columns = False
    samples = [sample for sample, _ in samples_of(stock_step.make_rows())]
    names = {"model": model, "args": args, "samples": samples}
    trainer = run(PAGE, names, part("SampleCollator"))["trainer"]
    assert trainer.train().training_loss > 0
