"""What adapters check of what they are given: lists of one length, samples of one batch, masks, rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, ModelError, SchemaError, kind_of
from mmpack.schema.rules import packing_problems
from mmpack.schema.sample import Sample

if TYPE_CHECKING:
    from mmpack.packing.batch import Batch


def check_each(where: str, count: int, of: str, lists: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless each of `lists`, by name, has one entry per thing; None is no list.

    Args: `count`, `of`: how many things there are, and what they are called.
    """
    for name, values in lists.items():
        if values is None:
            continue
        if not is_list(values):
            raise ArgumentError(
                f"{where}: {name} is {kind_of(values)}, expected a list. Fix: pass one entry for each of the {of}"
            )
        if len(values) != count:
            raise ArgumentError(
                f"{where}: {name} has {len(values)} entries for {count} {of}. Fix: pass one for each, in their order"
            )


def check_kind(what: str, given: Any, kind: Any, fix: str) -> None:
    """Raise ArgumentError unless `given` is of a type. Args: `what`: begins the error, names what is given."""
    if not isinstance(given, kind):
        raise ArgumentError(f"{what} is {kind_of(given)}. Fix: {fix}")


def is_list(given: Any) -> bool:
    """Whether it has entries by number: a list, an array or a tensor, and no text or dict."""
    sized = hasattr(given, "__len__") and getattr(given, "ndim", 1) != 0
    return sized and not isinstance(given, Mapping | str | bytes)


def check_groups(where: str, group_ids: Sequence[Any]) -> None:
    """Raise ArgumentError unless each group's id is a text."""
    for i, group in enumerate(group_ids):
        if not isinstance(group, str):
            raise ArgumentError(
                f"{where}: group_ids[{i}] is {kind_of(group)}, expected a str. Fix: pass the group's name"
            )


def as_list(given: Any, where: str) -> list[Any]:
    """The entries of a list or a tuple; none of None. Raises: ArgumentError."""
    if not isinstance(given, list | tuple | None):
        raise ArgumentError(f"{where} is {kind_of(given)}, expected a list. Fix: pass a list")
    return list(given or ())


def as_number(given: Any, where: str) -> float:
    """A finite number, of the host or of an array or a tensor that holds one. Raises: ArgumentError; a text is none."""
    try:
        if isinstance(given, str | bytes):
            raise TypeError
        value = float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ArgumentError(
            f"{where} is {kind_of(given)}, expected a number. Fix: pass the score as a float"
        ) from None
    if not math.isfinite(value):
        raise ArgumentError(
            f"{where} is {value}, expected a finite number. Fix: leave out samples that were not scored"
        )
    return value


def check_same(batch: Batch, samples: Sequence[Sample]) -> None:
    """Raise ArgumentError unless `samples` are those of `batch`, in its order."""
    counts = [s.num_loss_tokens for s in samples]
    if [s.sample_id for s in samples] != batch.sample_ids or counts != batch.loss_counts:
        raise ArgumentError(
            "from_batch: samples are not those of the batch, or in another order. "
            "Fix: pass the batch's samples, in its order"
        )


def check_samples(samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]] | None) -> None:
    """Raise ArgumentError for no samples, and for a column of `from_samples` without one entry per sample.

    SchemaError for samples that hold what the other side would not carry on.
    """
    if not samples:
        raise ArgumentError("from_samples: samples is empty. Fix: pass at least one")
    check_each("from_samples", len(samples), "samples", columns or {})
    left_behind = [problem for sample in samples for problem in packing_problems(sample)]
    if left_behind:
        raise SchemaError(left_behind, "from_samples")


def valid_tokens(mask: np.ndarray, where: str, fix: str) -> slice:
    """The tokens that `mask` bool [L] keeps, from first to last. Raises: ArgumentError for a hole between them."""
    kept = np.flatnonzero(mask)
    start, stop = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
    if stop - start != len(kept):
        raise ArgumentError(f"{where}: attention_mask has a 0 between tokens. Fix: {fix}")
    return slice(start, stop)


def refuse_reward_on_no_token(where: str) -> None:
    """Raise LayoutError (MM305): the row has a reward and no response token to put it on."""
    raise LayoutError(
        f"{where} has a reward and no response token (empty_response). "
        "Fix: drop rows without a response before scoring them",
        "MM305",
    )


def refuse_on(where: str, options: Iterable[tuple[str, Any, str]]) -> None:
    """Raise ModelError for a framework's option that a packed pass can't obey. Args: `options`: (name, is on, fix)."""
    for name, on, fix in options:
        if on:
            raise ModelError(
                f"{where}: {name} is on, which the packed pass does not support. Fix: {fix}"
            )
