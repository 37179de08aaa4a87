"""`class Trainer(MmpackAsyncGRPO, AsyncGRPOTrainer)`: TRL's asynchronous GRPO, on pictures.

TRL's own has ids only: its trie, its batch and its forward have no place for pixels. Here a rollout is a Sample, its
batches are packs, and logprobs and entropies are those of `packed_logprobs`. Weights, versions, staleness, queue,
callbacks and metrics are TRL's.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.transformers.attention import attach, refuse_unpackable
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.adapters.trl.mixin import TrainerMixin
from mmpack.errors import ArgumentError, BackendError, check_whole
from mmpack.losses.policy.loss import policy_loss
from mmpack.schema.rules import check
from mmpack.schema.sample import Sample

WHAT = "MmpackAsyncGRPO"
# what TRL logs of a micro-batch, and the metric of `policy_loss` that is the same mean
LOGGED = {"ratio": "ratio", "kl": "kl_old", "entropy": "entropy"}


class MmpackAsyncGRPO(TrainerMixin):
    """Mix in before `trl.experimental.async_grpo.AsyncGRPOTrainer`; takes its arguments. One process.

    `rollout_worker` gives samples: a `SampleWorker`, or one of yours that puts what `to_rollouts` makes on its queue.
    A micro-batch is `per_device_train_batch_size` samples, packed, prompts and pictures once; `token_budget` is not
    read. The loss is TRL's: clipped, the mean over a micro-batch's tokens, logarithms of ratios cut to ±20.
    As in TRL, the text model and the head are trained, the vision tower is not.

    Raises, when built: MissingExtraError, BackendError for another TRL; ModelError for several processes, the
    router's auxiliary loss and families that can't be packed; ArgumentError without a `rollout_worker`.
    """

    _trainer = "AsyncGRPOTrainer"
    _methods: ClassVar = {"compute_loss": ("model", "inputs"), "get_train_dataloader": ()}

    def __init__(self, *args: Any, **kwargs: Any):
        self._check_trl("trl.experimental.async_grpo.async_grpo_trainer")
        if kwargs.get("rollout_worker") is None:
            raise ArgumentError(
                f"{WHAT}: TRL's own rollout worker drops pictures. Fix: pass rollout_worker=SampleWorker(rollouts)"
            )
        super().__init__(*args, **kwargs)
        options = (
            ("several processes", self.accelerator.num_processes > 1, "run one, or use MmpackGRPO"),
            ("the router's auxiliary loss", self.aux_loss_enabled, "router_aux_loss_coef=0.0"),
        )
        refuse_on(WHAT, options)
        whole = unwrap(self.accelerator.unwrap_model(self.model), WHAT)
        # TRL loads every part with an attention that needs its trie; the tower has none
        whole.set_attn_implementation("sdpa")
        refuse_unpackable(whole)

    def get_train_dataloader(self) -> Any:
        """TRL's queue, which drops what is stale, in packs."""
        from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

        self._rollout_dataset = RolloutQueueDataset(
            rollout_queue=self.rollout_queue,
            model_version_fn=lambda: self.model_version,
            check_health_fn=self.rollout_worker.check_health,
            stale_after_s=self.args.heartbeat_stale_after_s,
            metrics=self._metrics["train"],
            max_staleness=self.args.max_staleness,
        )
        dataset = _MicroBatches(self._rollout_dataset, self.args.per_device_train_batch_size)
        # not prepared by accelerate, which would cut a batch for ranks, and read one ahead: it would be older
        return torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=self._collate)

    def _collate(self, micro_batches: list[list[dict[str, Any]]]) -> dict[str, Any]:
        (rows,) = micro_batches
        samples = [row["input_ids"] for row in rows]
        self._trained_groups.update(row["group_id"] for row in rows)
        batch = pack_shared(samples, self.model)
        metrics = self._metrics["train"]
        lengths = sum(map(len, samples))
        metrics["batch/packing_ratio"].append((lengths, batch.num_tokens))
        metrics["sample/forwarded_tokens_mean"].append(lengths / len(samples))
        metrics["sample/trained_tokens_mean"].append(batch.num_loss_tokens / len(samples))
        metrics["mmpack/patches"].append(batch.stats["patches"])
        for name in dict.fromkeys(name for row in rows for name in row["metrics"]):
            values = [row["metrics"][name] for row in rows if name in row["metrics"]]
            metrics[name].append(sum(values) / len(values))
        return {"pack": batch, "advantages": torch.tensor([row["advantage"] for row in rows])}

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """TRL's loss of one pack, of packed logprobs."""
        start, batch = time.time(), inputs["pack"].to(self.accelerator.device)
        with self.accelerator.autocast(), attach(model):
            logprobs, entropy = packed_logprobs(model, batch, self.temperature, entropy=True)
        self._step_forward_s += time.time() - start
        out = policy_loss(
            logprobs,
            inputs["advantages"].to(logprobs.device),
            batch.cu_loss,
            old_logprobs=batch.loss_columns["rollout_logprobs"],
            entropy=entropy.detach(),
            per="sample",
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
        )
        metrics = self._metrics["train"]
        logged = {k: out.metrics[v] for k, v in LOGGED.items()}
        logged["clip_ratio/region_mean"] = out.metrics["clip_fraction"]
        for name, value in zip(logged, torch.stack(list(logged.values())).tolist(), strict=True):
            metrics[name].append(value)
        self._step_forward_tokens += batch.num_tokens
        self._step_trained_tokens += batch.num_loss_tokens
        self._step_samples += len(batch.token_counts)
        self._step_seq_len_weighted += batch.num_tokens**2 / len(batch.token_counts)
        return out.loss / self.current_gradient_accumulation_steps


class _MicroBatches(torch.utils.data.IterableDataset):
    """Lists of `size` rows of TRL's queue."""

    def __init__(self, rows: Any, size: int):
        self.rows, self.size = rows, size

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        batch = []
        for row in self.rows:
            if not isinstance(row["input_ids"], Sample):
                raise ArgumentError(
                    f"{WHAT}: the queue holds a rollout of ids, not of a Sample. Fix: put what to_rollouts returns"
                )
            batch.append(row)
            if len(batch) == self.size:
                yield batch
                batch = []


# ---- what feeds it ----------------------------------------------------------------------------------

Rollouts = Callable[[Callable[[], int]], Iterable[Sequence[Sample]]]
ROLLOUTS = "to_rollouts"


class SampleWorker:
    """A `rollout_worker=` for AsyncGRPOTrainer whose rollouts are samples, with pictures.

    `rollouts(version)` is a generator of yours, run in a thread: each item is the samples of one prompt or more, groups
    whole, with `rewards` and `rollout_logprobs`. `version()` is the number of the newest weights; what is yielded
    counts as sampled by those that were there when the item was asked for. `queue_size` samples wait for the trainer.
    """

    def __init__(self, rollouts: Rollouts, *, queue_size: int = 1024):
        check_whole("SampleWorker", "queue_size", queue_size, least=1)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=queue_size)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._rollouts = rollouts
        self._version = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last = time.monotonic()

    def start(self) -> None:
        self._stop.clear()
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mmpack-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the item that it is making; wait at most 5 s for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises: the generator's own error; BackendError where it ended, or gave nothing for `stale_after_s`."""
        if self._error is not None:
            raise self._error
        ended = self._thread is not None and not self._thread.is_alive()
        if ended and self.rollout_buffer.empty():
            raise BackendError(
                "SampleWorker: rollouts ended while the trainer still waits. Fix: yield groups for as long as it trains"
            )
        if time.monotonic() - self._last > stale_after_s:
            raise BackendError(
                f"SampleWorker: no group for {stale_after_s:g} s. "
                "Fix: check the engine, or raise heartbeat_stale_after_s"
            )

    def _run(self) -> None:
        number = 0
        try:
            groups = iter(self._rollouts(lambda: self._version))
            while not self._stop.is_set():
                version = self._version
                samples = next(groups, None)
                if samples is None:
                    return
                self._last = time.monotonic()
                for rollout in to_rollouts(samples, version, number):
                    self._put(rollout)
                number += len({s.group_id for s in samples})
        except BaseException as error:  # the trainer raises it, in check_health
            self._error = error

    def _put(self, rollout: Any) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                rollout.enqueued_at = time.time()
                self.rollout_buffer.put(rollout, timeout=0.2)
                self._last = time.monotonic()
                return


def to_rollouts(
    samples: Sequence[Sample],
    version: int = 0,
    first_group: int = 0,
    advantages: Sequence[float] | None = None,
) -> list[Any]:
    """TRL's `RolloutSample`s, one per sample, whose `input_ids` is the Sample: MmpackAsyncGRPO packs it.

    Args:
        version: number of the weights that sampled them.
        first_group: TRL counts prompts by number; groups get these, in order.
        advantages: one per sample; None: TRL's own formula, (r - mean) / (std + 1e-8) in each group of `rewards` sums.

    Raises: SchemaError for broken rules; ArgumentError for samples without rollout_logprobs, or rewards where those
    are needed, and for other lengths.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    check(samples, ROLLOUTS)
    _check_recorded(samples, advantages)
    groups = dict.fromkeys(s.group_id for s in samples)
    numbers = {name: number for number, name in enumerate(groups, first_group)}
    totals = [sum(float(r.value) for r in s.rewards or []) for s in samples]
    own = _group_advantages(samples, totals) if advantages is None else advantages
    out = []
    for sample, total, advantage in zip(samples, totals, own, strict=True):
        at = sample.loss_indices
        mask = np.zeros(len(sample), np.int64)
        mask[at] = 1
        logprobs = np.zeros(len(sample), np.float32)
        logprobs[at] = sample.rollout_logprobs
        metrics = {"reward": total} | {f"rewards/{r.name}": 0.0 for r in sample.rewards or []}
        for reward in sample.rewards or []:
            metrics[f"rewards/{reward.name}"] += float(reward.value)
        out.append(
            RolloutSample(
                prompt=[],  # texts are of no use here: what trains are ids
                completion=[],
                input_ids=cast(Any, sample),
                completion_mask=mask,
                old_log_probs=logprobs,
                advantage=float(advantage),
                model_version=version,
                group_id=numbers[sample.group_id],
                metrics=metrics,
            )
        )
    return out


def _check_recorded(samples: Sequence[Sample], advantages: Sequence[float] | None) -> None:
    if advantages is not None and len(advantages) != len(samples):
        raise ArgumentError(
            f"{ROLLOUTS}: {len(advantages)} advantages, {len(samples)} samples. Fix: pass one per sample"
        )
    for sample in samples:
        lacks = [
            name
            for name, absent in (
                ("rollout_logprobs", sample.rollout_logprobs is None),
                ("loss tokens", not sample.num_loss_tokens),
                ("rewards", advantages is None and not sample.rewards),
            )
            if absent
        ]
        if lacks:
            raise ArgumentError(
                f"{ROLLOUTS}: sample {sample.sample_id} has no {lacks[0]}. "
                "Fix: record it in the rollout, or leave the sample out"
            )


def _group_advantages(samples: Sequence[Sample], totals: Sequence[float]) -> list[float]:
    groups: dict[str, list[float]] = {}
    for sample, total in zip(samples, totals, strict=True):
        groups.setdefault(sample.group_id, []).append(total)
    of = {name: (np.mean(own), np.std(own) + 1e-8) for name, own in groups.items()}
    return [
        float((total - of[s.group_id][0]) / of[s.group_id][1])
        for s, total in zip(samples, totals, strict=True)
    ]
