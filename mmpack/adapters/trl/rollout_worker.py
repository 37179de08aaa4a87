"""What feeds TRL's AsyncGRPOTrainer with samples: its rollout worker, in a thread, over a generator of yours."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from mmpack.errors import ArgumentError, BackendError, check_whole
from mmpack.schema.rules import check
from mmpack.schema.sample import Sample

Rollouts = Callable[[Callable[[], int]], Iterable[Sequence[Sample]]]
WHAT = "to_rollouts"


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
        """Ends the thread once the item that is being made is there; at most 5 s are waited for it."""
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

    check(samples, WHAT)
    _check_recorded(samples, advantages)
    names = list(dict.fromkeys(s.group_id for s in samples))
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
                group_id=first_group + names.index(sample.group_id),
                metrics=metrics,
            )
        )
    return out


def _check_recorded(samples: Sequence[Sample], advantages: Sequence[float] | None) -> None:
    if advantages is not None and len(advantages) != len(samples):
        raise ArgumentError(
            f"{WHAT}: {len(advantages)} advantages, {len(samples)} samples. Fix: pass one per sample"
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
                f"{WHAT}: sample {sample.sample_id} has no {lacks[0]}. "
                "Fix: record it in the rollout, or leave the sample out"
            )


def _group_advantages(samples: Sequence[Sample], totals: Sequence[float]) -> list[float]:
    groups: dict[str, list[float]] = {}
    for sample, total in zip(samples, totals, strict=True):
        groups.setdefault(sample.group_id, []).append(total)
    return [
        float((total - np.mean(own)) / (np.std(own) + 1e-8))
        for total, own in ((t, groups[s.group_id]) for s, t in zip(samples, totals, strict=True))
    ]
