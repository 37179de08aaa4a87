"""Hugging Face datasets: a wrapped processor over their rows, whole or streamed, and samples out of them.

Run with datasets 5.2.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmpack.adapters.arrow import arrow_schema, from_table
from mmpack.adapters.checks import check_kind
from mmpack.adapters.process_rows import ProcessRows
from mmpack.errors import ArgumentError, needs
from mmpack.processors.wrap import Processor
from mmpack.schema.sample import Sample

with needs("data", __name__):
    import datasets

BATCH = 64  # rows that are processed at a time
KINDS = datasets.Dataset | datasets.IterableDataset


def map_samples(
    dataset: Any,
    processor: Processor | ProcessRows,
    *,
    pixels: bool = True,
    batch_size: int = BATCH,
    **options: Any,
) -> Any:
    """A dataset of samples, made of one whose rows `ProcessRows` reads; a Dataset or an IterableDataset, as given.

    The result is cached by datasets under a fingerprint that follows from the rows, the processor's settings and
    mmpack's version, in any process: neither a media cache nor the order of a dict changes it.

    Args:
        processor: of `mp.wrap_processor`, or a ProcessRows with options of its own.
        pixels: see `ProcessRows`; without, samples have the media's keys alone.
        batch_size: rows that are processed at a time.
        options: of `Dataset.map`, such as `num_proc`.

    Raises: ArgumentError; errors of rows while they are processed.
    """
    fix = "pass a Dataset, or an IterableDataset, of one split"
    check_kind("map_samples: dataset", dataset, KINDS, fix)
    rows = processor if isinstance(processor, ProcessRows) else ProcessRows(processor, pixels)
    features = datasets.Features.from_arrow_schema(arrow_schema(rows.pixels))
    options = {"features": features, **options}
    if isinstance(dataset, datasets.Dataset):
        options.setdefault("new_fingerprint", rows.fingerprint(dataset._fingerprint))
    # pictures as the bytes of their files: they are decoded once, by the processor
    undecoded = dataset.with_format("arrow")
    made = undecoded.map(rows, batched=True, batch_size=batch_size, **options)
    return made.with_format("arrow")


class Samples:
    """The samples of a dataset of `map_samples`: by number of a Dataset, in order of an IterableDataset.

    As `samples=` of a PackLoader, with `groups=` its `groups`, or as the data set of a DataLoader. Of a stream,
    `state_dict` and `load_state_dict` are the stream's: a loop goes on with the sample after the last one that was
    read. What a stream shuffles in a buffer is lost there, as datasets warns; shuffle shards or groups instead.
    """

    def __init__(self, dataset: Any):
        check_kind("Samples: dataset", dataset, KINDS, "pass what map_samples returned")
        self.dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        return from_table(self.dataset[i : i + 1] if i >= 0 else self.dataset[i:][:1])[0]

    @property
    def groups(self) -> list[str]:
        """The group_id of each sample of a Dataset; nothing else of them is read."""
        names: list[str] = self.dataset.select_columns(["group_id"])[:]["group_id"].to_pylist()
        return names

    def __iter__(self) -> Iterator[Sample]:
        for row in self.dataset:
            yield from_table(row)[0]

    def state_dict(self) -> dict[str, Any]:
        """The place of a stream, plain JSON."""
        state: dict[str, Any] = self._stream().state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream().load_state_dict(state)

    def _stream(self) -> Any:
        if isinstance(self.dataset, datasets.Dataset):
            raise ArgumentError(
                "Samples: a Dataset is read by index and keeps no position. Fix: use the loader's state_dict, or "
                "dataset.to_iterable_dataset()"
            )
        return self.dataset
