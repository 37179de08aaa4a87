"""The batches of a PackLoader as a data set of torch's loaders: packed in workers, in the order of the plan."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mmpack.adapters.checks import check_kind
from mmpack.adapters.torch.ahead import Mover
from mmpack.adapters.torch.loader import PackLoader, Place
from mmpack.adapters.torch.step import Cut, digest_of_cut
from mmpack.errors import ArgumentError, check_whole
from mmpack.packing.batch import PackedBatch
from mmpack.schema.dead_letters import DeadLetter


class StepBatch(NamedTuple):
    """One batch, and what of its step the loss needs."""

    batch: PackedBatch
    epoch: int
    step: int  # number of the step in its epoch
    number: int  # of the batch in its step
    last: bool  # an optimizer step follows
    total_tokens: int  # loss tokens of the step, of all ranks
    total_samples: int
    dead: tuple[DeadLetter, ...]  # what was left out of the step, with the loader's `dead_letters`


class PackBatches(IterableDataset):  # type: ignore[type-arg]
    """For `DataLoader(…, batch_size=None)` and torchdata's StatefulDataLoader: StepBatches of one epoch, on the CPU.

    Each worker reads and plans every step, and packs each n-th batch: the loader puts them together in the order that
    no worker at all gives. `state_dict` and `load_state_dict` are the place of this copy, which StatefulDataLoader
    collects from its workers: a run that is killed goes on with the next batch, bit for bit.

    Args:
        loader: a PackLoader on the CPU, with its samples, budgets and order. Its own place and thread are not used.

    A loader with `dead_letters` takes one worker, or none: several read each step apart, and could find different items
    dead. A worker's letters are in the file, those of a step also with its batches.

    Another epoch than 0, or than that of the state, is asked for by `set_epoch` before the loop.
    """

    def __init__(self, loader: PackLoader):
        check_kind("PackBatches: loader", loader, PackLoader, "pass a PackLoader")
        if loader.device.type != "cpu":
            raise ArgumentError(
                f"PackBatches: the loader's device is {loader.device}, but workers pack on the CPU. "
                "Fix: make PackLoader(…) without device=, and call batch.to(device) in the loop"
            )
        self.loader = loader
        self._next, self._done = Place(), 0
        self._cut: Cut = None
        self._resumes = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cut": digest_of_cut(self._cut)}

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next loop. A place that was loaded stays if it is in this epoch."""
        if epoch != self._next.epoch:
            self._next, self._cut, self._done, self._resumes = Place(epoch), None, 0, False

    def __iter__(self) -> Generator[StepBatch, None, None]:
        if not self._resumes:
            self._next, self._cut, self._done = Place(self._next.epoch), None, 0
        self._resumes = False
        info = get_worker_info()
        if info is not None and info.num_workers > 1 and self.loader.dead_letters is not None:
            raise ArgumentError(
                f"PackBatches: dead_letters with {info.num_workers} workers, which may disagree on which items failed. "
                "Fix: pass num_workers=1, or no dead_letters"
            )
        return self._read(0, 1) if info is None else self._read(info.id, info.num_workers)

    def _read(self, worker: int, workers: int) -> Generator[StepBatch, None, None]:
        done = self._done

        def turns() -> Generator[bool, None, None]:
            nonlocal done
            for number in count(done):
                done = number + 1
                yield number % workers == worker

        loader, mover = self.loader, Mover(torch.device("cpu"))
        try:
            for step, k, batch, _ in loader._made(
                self._next, digest_of_cut(self._cut), mover, turns()
            ):
                self._next, self._cut = loader._after(step, k + 1)
                self._done = done
                last = k + 1 == len(step.bins)
                totals = (step.total_tokens, step.total_samples)
                dead = tuple(step.dead)
                yield StepBatch(batch, step.epoch, step.number, k, last, *totals, dead)
        finally:
            self._cut = digest_of_cut(self._cut)  # the samples of a step need not stay

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch of this copy; `batches` counts those of all workers up to there."""
        return self.loader._state(self._next, self._cut) | {"batches": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop goes on there. Raises: ArgumentError, as PackLoader's."""
        if not isinstance(state, Mapping) or "batches" not in state:
            raise ArgumentError(
                "PackBatches: this is not a state of PackBatches. Fix: pass what its state_dict() returned"
            )
        check_whole("PackBatches", "the state's batches", state["batches"], least=0)
        self.loader.load_state_dict(state)
        self._next, self._cut = self.loader._next, self.loader._cut
        self._done, self._resumes = state["batches"], True
