"""The code of docs/frameworks.md runs, both sides."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_qwen2_5_vl
from support.trl_trainers import datasets, reward, rows_of, small_processor, trl
from test_docs_run import blocks, run
from transformers import TrainingArguments

PAGE = "docs/frameworks.md"
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))


def run_part(names, *words):
    [code] = [block for block in blocks(PAGE) if all(word in block[1] for word in words)]
    return run(PAGE, dict(names), [code])


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    import stock_step
    from trainer_policy import samples_of

    rows = stock_step.make_rows()
    items = list(samples_of(rows))
    return {
        "rows": rows,
        "items": items,
        "samples": [sample for sample, _ in items],
        "advantages": torch.tensor([columns["advantages"] for _, columns in items]),
        "padded": stock_step.padded,
        "stock_loss": stock_step.stock_loss,
        "model": stock_step.make_model(),
        "folder": str(tmp_path_factory.mktemp("out")),
    }


@pytest.mark.slow
def test_trl_s_both_sides(given):
    yours = {
        "model": tiny_qwen2_5_vl(),
        "reward_funcs": reward,
        "args": trl.GRPOConfig(
            given["folder"],
            per_device_train_batch_size=4,
            num_generations=4,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        "train_dataset": datasets.Dataset.from_list(rows_of((0,))),
        "processing_class": small_processor(),
    }
    stock = run_part({"yours": yours}, "trainer = GRPOTrainer(")["trainer"]
    packed = run_part({"yours": yours | {"model": tiny_qwen2_5_vl()}}, "MmpackGRPO")["trainer"]
    assert type(stock) is trl.GRPOTrainer and isinstance(packed, trl.GRPOTrainer)
    assert packed.mmpack_stats.passes == 0


@pytest.mark.slow
def test_the_trainer_s_both_sides(given):
    args = TrainingArguments(given["folder"], use_cpu=True, report_to=[], max_steps=1)
    args.remove_unused_columns = False
    names = given | {"args": args, "model": copy.deepcopy(given["model"])}
    stock = run_part(names, "data_collator=padded")["trainer"]
    packed = run_part(names, "SampleCollator")["trainer"]
    labels = next(iter(stock.get_train_dataloader()))["labels"]
    inputs = next(iter(packed.get_train_dataloader()))
    assert (labels != -100).sum() == inputs["shift_labels"].numel() > 0
    assert inputs["input_ids"].numel() < labels.numel() / 2


def test_what_to_log(given, capsys):
    ran = run_part(given, "mp.metrics(")
    assert str(sorted(ran["logged"])[:3]) in (ROOT / PAGE).read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"{sorted(ran['logged'])[:3]}\n" and len(ran["packs"]) > 1
    assert ran["logged"]["policy/tokens"] == ran["plan"].total_tokens


@pytest.mark.logging
def test_traces_are_logged(given, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")

    seen = []
    monkeypatch.setattr(trackio, "log", lambda payload, step: seen.append((payload, step)))
    names = given | {"tokenizer": small_processor().tokenizer, "pictures": {}, "step": 2}
    run_part(names, "to_traces")
    [(payload, step)] = seen
    assert step == 2 and len(payload["rollouts"]) == len(given["samples"])
    assert all(isinstance(t, trackio.Trace) for t in payload["rollouts"])
