"""Steps cut out of a stream of samples: whole groups, in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mmpack.adapters.checks import check_kind
from mmpack.errors import check_whole
from mmpack.packing.collate import Item, sample_and_columns


class GroupedSteps:
    """`steps=` of a PackLoader: lists of samples of `groups_per_step` groups; the last one may have fewer.

    A group is a run of samples with one `group_id`. Where the stream has `state_dict` and `load_state_dict` (a
    streamed data set of `mmpack.adapters.datasets.Samples`), so do these steps, and a resumed loader reads nothing
    twice but the rest of the step that it was cut in.

    Args:
        samples: an iterable of Samples, or of pairs (Sample, columns), read anew for each epoch.
        groups_per_step: prompts of one optimizer step.
    """

    def __init__(self, samples: Iterable[Item], groups_per_step: int):
        check_whole("GroupedSteps", "groups_per_step", groups_per_step)
        check_kind("GroupedSteps: samples", samples, Iterable, "pass an iterable of Samples")
        self.samples, self.groups_per_step = samples, groups_per_step
        self._knows = hasattr(samples, "load_state_dict")
        self._begin = self._next = self._place()

    def __iter__(self) -> Iterator[list[Item]]:
        """Yield the items of each step."""
        items: list[Item] = []
        group, groups = None, 0
        place = self._next = self._place()  # of the item that is read next
        for i, item in enumerate(self.samples):
            sample, _ = sample_and_columns(item, i, "GroupedSteps")
            if not items or sample.group_id != group:
                if groups == self.groups_per_step:
                    self._next = place
                    yield items
                    items, groups = [], 0
                group, groups = sample.group_id, groups + 1
            items.append(item)
            place = self._place()
        self._next = place
        if items:
            yield items

    def state_dict(self) -> Any:
        """Where the step after the last one begins in the stream; None of a stream that does not say."""
        return self._next

    def load_state_dict(self, state: Any) -> None:
        """The next loop begins there; None: with the first sample."""
        if self._knows:
            self.samples.load_state_dict(self._begin if state is None else state)  # type: ignore[attr-defined]

    def _place(self) -> Any:
        return self.samples.state_dict() if self._knows else None  # type: ignore[attr-defined]
