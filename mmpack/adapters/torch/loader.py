"""`PackLoader`: samples to optimizer steps of packed batches on the device, planned and packed one batch ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from mmpack.adapters.checks import check_kind
from mmpack.adapters.torch.ahead import Ahead, Mover
from mmpack.adapters.torch.dead import Sorted, dropped_letters, sorted_out
from mmpack.adapters.torch.order import (
    STATE_VERSION,
    check_ranks,
    check_source,
    check_state,
    device_of,
    groups_in,
    steps_of,
)
from mmpack.adapters.torch.step import Cut, Step, digest_of, digest_of_cut
from mmpack.errors import ArgumentError, check_flag, check_whole
from mmpack.packing.batch import PackedBatch
from mmpack.packing.collate import Item, collate, sample_and_columns
from mmpack.packing.idle import idle_batch
from mmpack.packing.tensors import as_tensor
from mmpack.planning.cost import Cost, sharing_of
from mmpack.planning.plan import plan
from mmpack.schema.dead_letters import DeadLetter, DeadLetters, letter_of


@dataclass(frozen=True)
class Place:
    """What comes next: a batch of a step of an epoch, and where steps that know their place begin that step."""

    epoch: int = 0
    step: int = 0
    batch: int = 0
    source: Any = None


class _Made(NamedTuple):
    """A batch on its way to the reader."""

    step: Step
    number: int  # of the batch in its step
    batch: PackedBatch
    event: Any


class PackLoader:
    """Iterate over it for the Steps of one epoch, and over each Step for its batches, on the device.

    One thread plans, packs and copies the next batch while this one is computed on. On CUDA a batch is packed into
    pinned memory and copied on a stream of its own; the current stream of whoever asks for it waits for the copy.

    Args:
        samples: a list or a map-style data set of Samples, or of pairs (Sample, columns) as in `collate`.
        steps: in place of `samples`: the items of each optimizer step, a list per step. Of an iterable that is no list
            a resumed epoch reads and skips the steps that were done, unless it knows its place: `state_dict()` says
            where the next step begins, `load_state_dict(state)` goes there (None: to the beginning), as GroupedSteps.
        max_tokens, max_patches, max_samples, max_loss_tokens, max_media_bytes, cost, on_invalid: see `plan`.
        keep_groups: see `plan`.
        share_prefix: see `plan`; a batch shares as planned.
        pad_to_multiple_of, media: see `pack`.
        loss_columns: name -> one entry per item of `samples`: a value per loss token, or one for all of them.
        groups_per_step: groups (prompts) of one optimizer step; None: all samples in one step. A group stays whole.
        groups: the group of each item, where a data set should not be read for it beforehand.
        shuffle, seed: groups in a new order each epoch, as DistributedSampler's of seed + epoch: alike on all ranks.
        drop_last: leave out a last step of fewer groups.
        device: where batches go, of this process.
        rank, ranks: each rank gets as many batches of a step as the others, of like cost (`Plan.ranks`); of a step with
            too few samples for that, some are an `idle_batch`.
        prefetch: batches on the device in addition to the one that is computed on; 0: none, and no thread.
        dead_letters: takes what can't be used, and the loop goes on without it, as with `on_invalid="drop"`: items
            that the data set can't give or that are DeadLetters, samples that `plan` drops, and samples whose media
            `media` has not. `Step.dead` has a step's.

    A Step whose samples were all dropped (`on_invalid="drop"`) is left out. Leaving the loop ends the thread, as
    `close` and `with` do; a loop that begins ends the one before. A loop begins with the epoch, or where a state that
    was loaded says. Errors of the data set, of planning and of packing are raised in the loop, with a note of the
    place.
    """

    def __init__(
        self,
        samples: Sequence[Item] | Any = None,
        *,
        steps: Iterable[Sequence[Item]] | None = None,
        max_tokens: int,
        max_patches: int | None = None,
        max_samples: int | None = None,
        max_loss_tokens: int | None = None,
        max_media_bytes: int | None = None,
        cost: Cost | None = None,
        on_invalid: str = "raise",
        keep_groups: bool = False,
        share_prefix: bool | str = False,
        pad_to_multiple_of: int | None = None,
        media: Mapping[str, Any] | None = None,
        loss_columns: Mapping[str, Sequence[Any]] | None = None,
        groups_per_step: int | None = None,
        groups: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 1,
        dead_letters: DeadLetters | None = None,
    ):
        check_ranks(rank, ranks)
        for name, number in (("prefetch", prefetch), ("seed", seed)):
            check_whole("PackLoader", name, number, least=0)
        if groups_per_step is not None:
            check_whole("PackLoader", "groups_per_step", groups_per_step)
        if not isinstance(share_prefix, str):
            check_flag("PackLoader", "share_prefix", share_prefix)
            share_prefix = bool(share_prefix)
        check_flag("PackLoader", "keep_groups", keep_groups)
        loss_columns = {} if loss_columns is None else loss_columns
        fix = "pass {name: one entry for each sample}, such as {'advantages': advantages}"
        check_kind("PackLoader: loss_columns", loss_columns, Mapping, fix)
        ordered = groups_per_step is not None or groups is not None or shuffle or drop_last
        check_source(samples, steps, loss_columns, groups, ordered)
        self.samples, self.steps, self.loss_columns = samples, steps, dict(loss_columns)
        self.groups = groups
        self.device = device_of(device)
        self.rank, self.prefetch, self.cost, self.media = rank, prefetch, cost, media
        self.dead_letters = dead_letters
        # what decides which samples a step has, and which batches
        self.order: dict[str, Any] = {
            "groups_per_step": groups_per_step,
            "shuffle": bool(shuffle),
            "seed": seed,
            "drop_last": bool(drop_last),
        }
        self.planned: dict[str, Any] = {
            "max_tokens": max_tokens,
            "max_patches": max_patches,
            "max_samples": max_samples,
            "max_loss_tokens": max_loss_tokens,
            "max_media_bytes": max_media_bytes,
            "share_prefix": sharing_of(share_prefix, None, "PackLoader"),
            "on_invalid": on_invalid if dead_letters is None else "drop",
            "ranks": ranks,
            "keep_groups": bool(keep_groups),
        }
        self.pad_to_multiple_of = pad_to_multiple_of
        self._next = Place()
        self._cut: Cut = None  # what `_next` is in the middle of
        self._resumes = False
        self._ahead: Ahead[_Made] | None = None
        self._groups: list[list[int]] | None = None
        self._samples: str | None = None  # digest of the groups' names, where they were read
        self._loaded: str | None = None  # that of the state

    @property
    def epoch(self) -> int:
        """Number of the next loop; it grows where a loop ends."""
        return self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next loop. A place that was loaded stays if it is in this epoch."""
        check_whole("PackLoader", "epoch", epoch, least=0)
        if epoch != self._next.epoch:
            self._next, self._cut, self._resumes = Place(epoch), None, False
            self._loaded = None

    def __len__(self) -> int:
        """Steps of an epoch."""
        if self.steps is None:
            return len(self._steps(self.epoch))
        return len(self.steps)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Step]:
        if not self._resumes:
            self._next, self._cut = Place(self._next.epoch), None
        self.close()
        return self._read()

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch; those that were made ahead count as not read. The same on all ranks in step."""
        return self._state(self._next, self._cut)

    def _state(self, place: Place, cut: Cut) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            **asdict(place),
            "order": dict(self.order),
            "planned": dict(self.planned),
            "step_digest": digest_of_cut(cut),
            "samples_digest": self._samples or self._loaded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop goes on at that place, with the same batches, bit for bit.

        Raises ArgumentError where this loader makes other steps, or in the middle of a step other batches: budgets and
        ranks may change only between steps. When the loop begins, groups (their names, item by item) and the samples
        of a step that was cut (tokens and media) are compared.
        """
        check_state(state, self.order, self.planned)
        self.close()
        self._next = Place(state["epoch"], state["step"], state["batch"], state.get("source"))
        self._cut, self._resumes = state["step_digest"], True
        self._loaded = state["samples_digest"]

    def close(self) -> None:
        """End the loop in progress, and its thread."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._cut = digest_of_cut(self._cut)  # the samples of a step that was left need not stay

    def __enter__(self) -> PackLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Without the loop in progress; a copy begins where this one is."""
        cut = digest_of_cut(self._cut)
        return self.__dict__ | {"_ahead": None, "_resumes": True, "_cut": cut}

    # in the thread

    def _made(
        self, start: Place, digest: str | None, mover: Mover, turns: Iterator[bool] | None = None
    ) -> Generator[_Made, None, None]:
        """Batches from `start` on, to the end of the epoch. `turns`: for each, whether it is made."""
        at = start
        try:
            for number, items, source, after in self._items_from(start):
                first = start.batch if number == start.step else 0
                at = Place(start.epoch, number, first, source)
                step, columns, media = self._planned(at, items)
                step.places = (source, after)
                if at.batch and (step.digest != digest or at.batch >= len(step.bins)):
                    raise ArgumentError(
                        f"PackLoader: step {number} of epoch {at.epoch} has samples or batches unlike those when the "
                        "state was saved. Fix: pass the same samples, in the same order"
                    )
                for k in range(step.first, len(step.bins)):
                    at = replace(at, batch=k)
                    if turns is not None and not next(turns):
                        continue
                    # no name keeps a batch while the next one waits to be made
                    batch = self._batch(step, columns, k, mover.pins, media)
                    sent = [_Made(step, k, *mover.send(batch))]
                    del batch
                    yield sent.pop()
                at = Place(at.epoch, number + 1)
        except Exception as error:
            error.add_note(f"PackLoader: in epoch {at.epoch}, step {at.step}, batch {at.batch}")
            raise

    def _planned(
        self, at: Place, items: Sequence[Item | DeadLetter]
    ) -> tuple[Step, list[Mapping[str, Any]], Mapping[str, Any] | None]:
        """The step, the columns of its samples, and where its media are."""
        letters, media = self.dead_letters, self.media
        if letters is None:
            pairs = [sample_and_columns(item, i, "PackLoader") for i, item in enumerate(items)]
            found = Sorted(pairs, list(range(len(pairs))), [], {})
        else:
            where = f"epoch {at.epoch}, step {at.step}"
            found = sorted_out(items, media, self.planned["ranks"], where)
            media = found.pixels if media is not None and self.planned["ranks"] == 1 else media
        samples = [sample for sample, _ in found.alive]
        made = plan(samples, cost=self.cost, **self.planned)
        if letters is not None:
            found.dead.extend(dropped_letters(made, samples, found.numbers, where))
            letters.add(found.dead)
        mine = made.ranks[self.rank]
        bins, share = [made.bins[b] for b in mine], [made.share[b] for b in mine]
        step = Step(at.epoch, at.step, samples, made, bins, share, at.batch, found.dead)
        return step, [columns for _, columns in found.alive], media

    def _batch(
        self,
        step: Step,
        columns: list[Mapping[str, Any]],
        k: int,
        pins: bool,
        media: Mapping[str, Any] | None,
    ) -> PackedBatch:
        """The `k`th batch of this rank; one without samples has the columns of a sample of the step."""
        if step.bins[k]:
            batch = collate(
                [(step.samples[i], columns[i]) for i in step.bins[k]],
                media=media,
                share_prefix=step.share[k],
                pad_to_multiple_of=self.pad_to_multiple_of,
                pin_memory=pins,
            )
        else:
            like = next(i for members in step.plan.bins for i in members)
            batch = idle_batch(
                step.samples[like],
                pad_to_multiple_of=self.pad_to_multiple_of,
                loss_columns={name: _listed(values) for name, values in columns[like].items()},
            )
            batch = batch.pin_memory() if pins else batch
        batch.tower_runs = step.tower_runs[k]
        return batch

    def _items_from(
        self, start: Place
    ) -> Iterator[tuple[int, Sequence[Item | DeadLetter], Any, Any]]:
        """The number and the items of each step left, and where steps that know their place begin it and the next.

        Raises: ArgumentError at the end of an epoch that ends before `start`.
        """
        count = 0 if start.source is None else start.step
        for number, items, before, after in self._steps_from(start):
            count = number + 1
            if number >= start.step:
                if self.steps is None:
                    items = [self._item(i) for i in items]
                yield number, items, before, after
        if (start.step, start.batch) > (count, 0):
            raise ArgumentError(
                f"PackLoader: the state goes on at batch {start.batch} of step {start.step}, but epoch {start.epoch} "
                f"has {count} steps. Fix: load a state of this loader with these samples, or none to begin anew"
            )

    def _steps_from(self, start: Place) -> Iterator[tuple[int, Sequence[Any], Any, Any]]:
        if self.steps is None or not hasattr(self.steps, "load_state_dict"):
            steps = self._steps(start.epoch) if self.steps is None else self.steps
            for number, items in enumerate(steps):
                yield number, items, None, None
            return
        before, skipped = start.source, 0 if start.source is not None else start.step
        self.steps.load_state_dict(before)
        for number, items in enumerate(self.steps, start.step - skipped):
            after = self.steps.state_dict()  # type: ignore[attr-defined]
            yield number, items, before, after
            before = after

    def _item(self, i: int) -> Item | DeadLetter:
        item = self._given(i)
        if isinstance(item, DeadLetter):
            return item
        sample, columns = sample_and_columns(item, i, "PackLoader")
        return sample, {**columns, **{name: c[i] for name, c in self.loss_columns.items()}}

    def _given(self, i: int) -> Any:
        """Item i; with `dead_letters`, its letter where the data set raises."""
        if self.dead_letters is None:
            return self.samples[i]
        try:
            return self.samples[i]
        except Exception as error:
            return letter_of(error, f"samples[{i}]")

    def _steps(self, epoch: int) -> list[list[int]]:
        count = len(self.samples)
        if not (self.order["shuffle"] or self.order["groups_per_step"]):
            return [list(range(count))] if count else []
        if self._groups is None:
            names = self.groups
            if names is None:
                names = [_group_of(self._given(i), i) for i in range(count)]
            self._samples, self._groups = digest_of(list(names)), groups_in(names)
        if self._loaded not in (None, self._samples):
            raise ArgumentError(
                "PackLoader: the state belongs to other samples: group names, sizes or order differ. "
                "Fix: pass the same samples, in the same order"
            )
        return steps_of(self._groups, epoch=epoch, **self.order)

    # where batches are read

    def _read(self) -> Iterator[Step]:
        self.close()
        start, mover, self._resumes = self._next, Mover(self.device), False
        ahead = Ahead(
            self._made(start, digest_of_cut(self._cut), mover), self.prefetch, "PackLoader"
        )
        self._ahead = ahead
        try:
            made = next(ahead, None)
            while made is not None:
                step, box = made.step, [made]
                made = None  # a batch is held by its reader alone
                batches = self._batches(step, box, ahead, mover)
                step._batches = batches
                self._next, self._cut = self._after(step, step.first)
                yield step
                batches.close()  # who still holds the step takes none of the next one's
                step._batches = None
                # also where the reader left the step before its end
                self._next, self._cut = self._after(step, len(step.bins))
                made = next(ahead, None)
                while made is not None and made.step is step:
                    made = next(ahead, None)
            self._next, self._cut = Place(start.epoch + 1), None
        finally:
            ahead.close()

    def _batches(
        self, step: Step, box: list[_Made], ahead: Ahead[_Made], mover: Mover
    ) -> Generator[PackedBatch, None, None]:
        """The batches of a step; the first lies in `box`."""
        for k in range(step.first, len(step.bins)):
            if not box:
                box.append(next(ahead))
            self._next, self._cut = self._after(step, k + 1)
            made = box.pop()
            batch = [mover.receive(made.batch, made.event)]
            del made
            yield batch.pop()

    def _after(self, step: Step, done: int) -> tuple[Place, Cut]:
        """The place behind `done` batches of a step, and the step where it is in the middle."""
        before, after = step.places
        if done == len(step.bins):
            return Place(step.epoch, step.number + 1, 0, after), None
        return Place(step.epoch, step.number, done, before), step if done else None


def _group_of(item: Any, i: int) -> str:
    """The group of an item; one that can't be had is a group of its own."""
    if isinstance(item, DeadLetter):
        return f"{item.code} {item.place}"
    return sample_and_columns(item, i, "PackLoader")[0].group_id


def _listed(value: Any) -> Any:
    """Values of loss tokens; a single number is one for all of them."""
    single = getattr(value, "ndim", None) == 0 or isinstance(value, int | float)
    return as_tensor(np.asarray(value)).reshape(1) if single else value
