"""MmpackAsyncGRPO in TRL's real AsyncGRPOTrainer, on pictures, against TRL's synchronous one: loss and gradients."""

import asyncio
import queue
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import PartialState
from support.models import relative_difference
from support.samples import make_sample
from support.trl_trainers import datasets, make_trainer, rows_of, small_processor, trl
from transformers import TrainerCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, _AsyncRolloutLoop

import mmpack as mp
from mmpack.adapters.loss_values import loss_columns
from mmpack.adapters.trl import MmpackAsyncGRPO, to_samples
from mmpack.adapters.trl.async_grpo import SampleWorker, to_rollouts
from mmpack.demo.chat_templates import QWEN2_5_VL
from mmpack.errors import ArgumentError, BackendError

STEPS = 2  # of one batch: the ratio of the first is 1, of the second it is not


class Asynchronous(MmpackAsyncGRPO, AsyncGRPOTrainer):
    pass


class Gradients(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        own = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        self.seen.append({n: g.clone() for n, g in own.items() if g is not None})


class Synchronous(trl.GRPOTrainer):
    """TRL's, which keeps what it generated; trained is what AsyncGRPOTrainer trains."""

    def _generate_and_score_completions(self, inputs):
        self.outputs = super()._generate_and_score_completions(inputs)
        return self.outputs


class NoTransfer:
    """There is no engine: its weights are nobody's."""

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        self.names = [name for name, _ in iterator]


SETTINGS = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 0.05}
SETTINGS |= {"lr_scheduler_type": "constant", "optim": "sgd", "logging_steps": 1}
SETTINGS |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0}


@pytest.mark.slow
def test_two_steps_are_those_of_synchronous_grpo(small_checkpoint, tmp_path, monkeypatch):
    # it asks CUDA for the name of the device, and has None for those that it does not know
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *args: None)
    processor = small_processor()
    processor.chat_template = processor.chat_template or QWEN2_5_VL
    rows = rows_of((8,))
    stock = make_trainer(
        Synchronous,
        small_checkpoint,
        tmp_path / "stock",
        rows,
        processor,
        num_iterations=STEPS,
        loss_type="bnpo",
        **SETTINGS,
    )
    for name, parameter in stock.model.named_parameters():
        parameter.requires_grad_("visual" not in name)
    expected = Gradients()
    stock.add_callback(expected)
    stock.train()

    samples = to_samples(
        stock.outputs,
        processor,
        images=[rows[0]["images"]] * 4,
        sampling={"temperature": 1.0, "logprobs": "processed"},
    )
    columns = loss_columns(samples)
    for sample, logprobs in zip(samples, columns["old_logprobs"], strict=True):
        sample.rollout_logprobs = np.asarray(logprobs, np.float32)
    advantages = stock.outputs["advantages"].tolist()
    assert len(samples[0].media) == 2 and np.abs(advantages).min() > 0

    worker = SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue(), versions=[])
    worker.start = worker.stop = lambda: None
    worker.check_health = lambda stale_after_s: pytest.fail("the queue ran dry")
    worker.update_model_version = worker.versions.append
    for _ in range(STEPS):
        for rollout in to_rollouts(samples, 1, 0, advantages):
            worker.rollout_buffer.put(rollout)
    own = Asynchronous(
        model=str(small_checkpoint),
        args=AsyncGRPOConfig(str(tmp_path / "own"), use_cpu=True, bf16=False, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"]}),
        processing_class=small_processor().tokenizer,
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
    )
    found = Gradients()
    own.add_callback(found)
    own.train()

    assert worker.versions == [1, 2, 3] and own.weight_transfer.names
    logs = [
        [row for row in t.state.log_history if "loss" in row and "step" in row]
        for t in (stock, own)
    ]
    assert len(logs[0]) == len(logs[1]) == STEPS == len(found.seen) == len(expected.seen)
    for k in range(STEPS):
        assert logs[1][k]["loss"] == pytest.approx(logs[0][k]["loss"], abs=1e-5)
        assert found.seen[k].keys() == expected.seen[k].keys()
        assert relative_difference(found.seen[k], expected.seen[k]) <= 1e-5
    assert logs[1][0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert abs(logs[1][1]["ratio"] - 1.0) > 1e-5
    assert logs[1][0]["entropy"] == pytest.approx(logs[0][0]["entropy"], abs=1e-4)
    assert logs[1][0]["batch/packing_ratio"] > 1.5


def rolled(count=4, groups=2):
    out = []
    for k in range(count):
        sample = make_sample(
            [("text", [1, 2]), ("image", (1, 2, 4), "x"), ("response", [3, 4 + k])],
            f"s{k}",
            f"g{k % groups}",
        )
        sample.rollout_logprobs = np.array([-0.5, -1.0 - k], np.float32)
        sample.rewards = [mp.Score("exact", k / 4), mp.Score("format", float(k % 3 == 0))]
        out.append(sample)
    return out


def test_advantages_and_metrics_are_those_of_trl_s_worker():
    samples = rolled(5, groups=1)
    by_name = {
        n: [r.value for s in samples for r in s.rewards if r.name == n] for n in ("exact", "format")
    }
    PartialState()  # which TRL's logger asks for
    loop = SimpleNamespace(
        reward_funcs=[lambda name=name, **kwargs: by_name[name] for name in by_name],
        reward_func_names=list(by_name),
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )
    sequence = SimpleNamespace(input_ids=[1], completion_mask=[1], old_log_probs=[0.0])
    each = {
        "prompts": [],
        "completions": [],
        "completions_ids": [],
        "completions_sequences": [sequence],
    }
    each |= {"tool_call_counts": 0, "tool_failure_counts": 0, "env_rewards": None}
    lists = {
        name: [value] * len(samples) for name, value in (each | {"rollout_rewards": None}).items()
    }
    group = RolloutGroup(reward_kwargs={}, model_version=7, group_id=3, **lists)
    theirs = asyncio.run(_AsyncRolloutLoop._score_group(loop, group))
    for a, b, sample in zip(theirs, to_rollouts(samples, 7, 3), samples, strict=True):
        assert b.advantage == pytest.approx(a.advantage, abs=1e-7)
        assert (b.model_version, b.group_id) == (a.model_version, a.group_id)
        assert b.metrics == pytest.approx({k: a.metrics[k] for k in b.metrics})
        assert b.input_ids is sample and b.completion_mask.sum() == 2
        assert b.old_log_probs[sample.loss_indices].tolist() == sample.rollout_logprobs.tolist()


def test_a_worker_gives_groups_and_hears_of_versions():
    asked = []

    def rollouts(version):
        for _ in range(3):
            asked.append(version())
            yield rolled()

    worker = SampleWorker(rollouts, queue_size=64)
    worker.update_model_version(5)
    worker.start()
    got = [worker.rollout_buffer.get(timeout=30) for _ in range(12)]
    assert [r.group_id for r in got] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert {r.model_version for r in got} == {5} == set(asked)
    assert all(r.enqueued_at for r in got)
    worker._thread.join(timeout=30)
    with pytest.raises(BackendError, match="rollouts ended while"):
        worker.check_health(60)
    worker.stop()


def test_a_worker_s_ends():
    def rollouts(version):
        yield rolled()
        raise RuntimeError("the engine is gone")

    worker = SampleWorker(rollouts)
    worker.start()
    worker._thread.join(timeout=30)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        worker.check_health(60)
    assert worker.rollout_buffer.qsize() == 4
    worker = SampleWorker(lambda version: iter([rolled()] * 9), queue_size=2)
    worker.start()
    first = worker.rollout_buffer.get(timeout=30)
    worker.stop()  # while it waits for room
    assert not worker._thread.is_alive() and first.input_ids.sample_id == "s0"
    worker._last -= 100
    with pytest.raises(BackendError, match="no group for 60 s"):
        worker.check_health(60)


@pytest.mark.parametrize("lack", ["rollout_logprobs", "rewards", "loss tokens"])
def test_what_a_rollout_must_have(lack):
    samples = rolled()
    if lack == "loss tokens":
        samples[1].loss_spans, samples[1].rewards = [], None
        samples[1].rollout_logprobs = np.zeros(0, np.float32)
    else:
        setattr(samples[1], lack, None)
    with pytest.raises(ArgumentError, match=f"^to_rollouts: sample s1 has no {lack}. Fix: "):
        to_rollouts(samples)


def test_wrong_use_is_an_error():
    with pytest.raises(ArgumentError, match="1 advantages, 4 samples"):
        to_rollouts(rolled(), advantages=[1.0])
    with pytest.raises(ArgumentError, match="names it after the trainer"):
        type("Wrong", (AsyncGRPOTrainer, MmpackAsyncGRPO), {})
    with pytest.raises(ArgumentError, match="not combined with AsyncGRPOTrainer"):
        MmpackAsyncGRPO()
    with pytest.raises(ArgumentError, match="TRL's own rollout worker drops pictures"):
        Asynchronous(model="none")
