"""`collate`: what a DataLoader calls in its workers, samples of one micro-batch to a PackedBatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.packing.batch import PackedBatch
from mmpack.packing.columns import Column
from mmpack.packing.pack import pack
from mmpack.packing.prepare import loss_tokens_of
from mmpack.packing.tensors import as_tensor
from mmpack.schema.sample import Sample

Item = Sample | tuple[Sample, Mapping[str, Any]]


def collate(
    items: Sequence[Item],
    *,
    media: Mapping[str, Any] | None = None,
    share_prefix: bool | str = False,
    pad_to_multiple_of: int | None = None,
    on_invalid: str = "raise",
    pin_memory: bool = False,
) -> PackedBatch:
    """`DataLoader(samples, batch_sampler=plan.bins, collate_fn=mp.collate)`: each bin becomes a batch.

    Args:
        items: Samples, or pairs (Sample, columns). Columns go into `loss_columns`: name -> [n], one value per loss
            token, or one number for all loss tokens of the sample, such as its advantage. All items have the same
            columns.
        media, share_prefix, pad_to_multiple_of, on_invalid, pin_memory: see `pack`; `functools.partial` sets them for a
            loader.

    Returns: PackedBatch on the CPU; a loader's `pin_memory=True` pins it. Raises: ArgumentError; SchemaError as `pack`.

    Example: each sample comes with its advantage.
        >>> import mmpack as mp
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> text["loss_spans"] = [{"start": 1, "stop": 3, "kind": "response"}]
        >>> samples = [
        ...     mp.Sample.from_dict(text | {"sample_id": f"q/{k}", "input_ids": [5, 6, 7 + k]})
        ...     for k in range(2)
        ... ]
        >>> batch = mp.collate([(samples[0], {"advantages": 0.5}), (samples[1], {"advantages": -0.5})])
        >>> batch.loss_targets.tolist(), batch.loss_columns["advantages"].tolist()
        ([6, 7, 6, 8], [0.5, 0.5, -0.5, -0.5])
    """
    if not isinstance(items, (list, tuple)):
        raise ArgumentError(
            f"collate: items is {type(items).__name__}, expected a list. Fix: pass collate_fn=mp.collate"
        )
    pairs = [sample_and_columns(item, i, "collate") for i, item in enumerate(items)]
    names = [list(columns) for _, columns in pairs]
    for i, own in enumerate(names):
        if set(own) != set(names[0]):
            raise ArgumentError(
                f"collate: items[{i}] has the columns {sorted(own)}, items[0] has {sorted(names[0])}. "
                "Fix: pass the same columns for every sample"
            )
    columns: dict[str, Column] = {
        name: [_whole(columns[name], sample) for sample, columns in pairs]
        for name in (names[0] if names else ())
    }
    return pack(
        [sample for sample, _ in pairs],
        media,
        share_prefix,
        pad_to_multiple_of,
        loss_columns=columns,
        on_invalid=on_invalid,
        pin_memory=pin_memory,
    )


def sample_and_columns(item: Any, i: int, what: str) -> tuple[Sample, Mapping[str, Any]]:
    """An item of a data set, with its columns if it has some. `i`: its number. Raises: ArgumentError."""
    sample, columns = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, {})
    if not isinstance(sample, Sample) or not isinstance(columns, Mapping):
        raise ArgumentError(
            f"{what}: items[{i}] is {type(item).__name__}, expected a Sample or (Sample, columns). "
            "Fix: pass samples; make one of a dict by mp.Sample.from_dict(item)"
        )
    return sample, columns


def _whole(value: Any, sample: Sample) -> Any:
    """A single number to each loss token; all else as it is."""
    if getattr(value, "ndim", None) == 0 or isinstance(value, (int, float)):
        return as_tensor(np.asarray(value)).expand(loss_tokens_of(sample))
    return value
