"""Ray Data: a wrapped processor as a stateful actor over a dataset of rows, and samples out of its blocks.

Run with ray 2.60.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmpack.adapters.arrow import from_table
from mmpack.adapters.checks import check_kind
from mmpack.adapters.process_rows import ProcessRows
from mmpack.errors import check_whole, needs
from mmpack.processors.wrap import Processor
from mmpack.schema.sample import Sample

with needs("ray", __name__):
    import ray.data

BATCH = 64  # rows that are processed, or read, at a time
FIX = "pass a ray.data.Dataset, as of ray.data.from_items(rows)"


def map_samples(
    dataset: Any,
    processor: Processor | ProcessRows,
    *,
    concurrency: int | tuple[int, int] = 1,
    pixels: bool = True,
    batch_size: int = BATCH,
    **options: Any,
) -> Any:
    """A Ray Dataset of samples, made lazily of one whose rows `ProcessRows` reads.

    Each actor gets one copy of the processor, and keeps its media cache: rows of one prompt that lie together process
    its pictures once. `write_parquet` of the result writes traces (`mp.read_trace`).

    Args:
        processor: of `mp.wrap_processor`, or a ProcessRows with options of its own.
        concurrency: actors, or (least, most) of them.
        pixels: see `ProcessRows`; without, samples have the media's keys alone, and blocks stay small.
        batch_size: rows that are processed at a time.
        options: of `map_batches`, such as `num_cpus` of each actor.

    Raises: ArgumentError; errors of rows where the dataset is read.
    """
    check_kind("map_samples: dataset", dataset, ray.data.Dataset, FIX)
    rows = processor if isinstance(processor, ProcessRows) else ProcessRows(processor, pixels)
    return dataset.map_batches(
        _Actor,
        fn_constructor_args=(rows,),
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=_pool(concurrency),
        zero_copy_batch=True,
        **options,
    )


def to_samples(dataset: Any, batch_size: int = BATCH) -> Iterator[Sample]:
    """The samples of a Ray Dataset of `map_samples`, a block at a time: what is read and not kept is freed.

    Blocks come as they are done; groups stay together with
    `ray.data.DataContext.get_current().execution_options.preserve_order = True`. Raises: TraceError.
    """
    check_kind("to_samples: dataset", dataset, ray.data.Dataset, FIX)
    check_whole("to_samples", "batch_size", batch_size)
    for table in dataset.iter_batches(batch_format="pyarrow", batch_size=batch_size):
        yield from from_table(table, "to_samples")


def _pool(concurrency: Any) -> Any:
    given = concurrency if isinstance(concurrency, tuple) else (concurrency,)
    for number in given:
        check_whole("map_samples", "concurrency", number)
    names = ("size",) if len(given) == 1 else ("min_size", "max_size")
    return ray.data.ActorPoolStrategy(**dict(zip(names, given, strict=True)))


class _Actor:
    """What Ray makes once per actor: map_batches wants a class."""

    def __init__(self, rows: ProcessRows):
        self.rows = rows

    def __call__(self, table: Any) -> Any:
        return self.rows(table)
