"""Rows of problems and answers to rows of samples: a wrapped processor as the function that data frameworks map.

Ray Data runs it as an actor, Hugging Face datasets in processes; each has a media cache of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from mmpack.adapters.arrow import to_table
from mmpack.adapters.checks import check_kind
from mmpack.errors import ArgumentError
from mmpack.processors.wrap import Processor
from mmpack.schema.plain_json import canonical_json

_SAME = ("response_ids", "rollout_logprobs", "group_id", "assistant_loss", "template_kwargs")
_NAMES = {"messages", "images", "media", "sample_id", *_SAME}


class ProcessRows:
    """A batch of rows to a pyarrow Table of samples (`mmpack.adapters.arrow.to_table`).

    A row has `messages` (a list, or its JSON text), `sample_id`, and where there are some `images` or `media` (bytes,
    pictures, or the {bytes, path} of datasets, in order of their parts), `response_ids`, `rollout_logprobs`,
    `group_id`. What else it has joins the sample's `metadata`.

    Args:
        processor: of `mp.wrap_processor`.
        pixels: processed pixels go along, as raw bytes, once per row that shows them.
        arguments: another reading of rows: row -> the arguments of `processor(…)`.

    Errors of a row are those of the processor, with a note of its sample_id.
    """

    def __init__(
        self,
        processor: Processor,
        pixels: bool = True,
        arguments: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ):
        fix = "pass mp.wrap_processor(hf_processor)"
        check_kind("ProcessRows: processor", processor, Processor, fix)
        self.processor, self.pixels = processor, pixels
        self.arguments = row_arguments if arguments is None else arguments

    def __call__(self, batch: Any) -> Any:
        """A Table or columns {name: values [B]} to a Table of samples. Raises: what `processor` does."""
        samples = []
        for row in _rows(batch):
            try:
                samples.append(self.processor(**self.arguments(row)))
            except Exception as error:
                error.add_note(
                    f"ProcessRows: in the row with sample_id {row.get('sample_id')!r:.80}"
                )
                raise
        return to_table(samples, self.pixels)

    def fingerprint(self, before: str) -> str:
        """16 hex digits that follow from `before`, the processor's settings and these options, in any process."""
        from mmpack import __version__

        if self.arguments is not row_arguments:
            raise ArgumentError(
                "ProcessRows: your own function reads the rows, and its fingerprint is not known. "
                "Fix: call map(…, new_fingerprint=…) with a text that names its version"
            )
        settings = [__version__, before, self.processor.fingerprint, self.processor.parts.kept_as]
        text = canonical_json(
            {"of": [*settings, str(self.processor.parts.media_root), self.pixels]}
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `processor(…)` that a row stands for; see `ProcessRows`. Raises: ArgumentError."""
    missing = [name for name in ("messages", "sample_id") if row.get(name) is None]
    if missing:
        raise ArgumentError(
            f"ProcessRows: a row has no {missing[0]}, but {sorted(row)}. "
            "Fix: rename the column, or pass arguments=, a function from a row to the processor's arguments"
        )
    out = {name: row[name] for name in _SAME if row.get(name) is not None}
    media = row.get("images") if row.get("media") is None else row["media"]
    out["messages"], out["sample_id"] = _messages(row["messages"]), str(row["sample_id"])
    if media is not None and len(media):
        out["media"] = [_medium(item) for item in media]
    more = {name: value for name, value in row.items() if name not in _NAMES and value is not None}
    if more:
        out["metadata"] = more
    return out


def _rows(batch: Any) -> list[dict[str, Any]]:
    if hasattr(batch, "to_pylist"):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    names = list(batch)
    return [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages as a processor takes them: a struct of Arrow has every key of any message, null where it had none."""
    if isinstance(given, str):
        given = json.loads(given)
    return [_without_nulls(message) for message in given]


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if value is not None}
    if not isinstance(out.get("content"), str | None):
        parts = [{k: v for k, v in part.items() if v is not None} for part in out["content"]]
        out["content"] = parts
    return out


def _medium(item: Any) -> Any:
    """The file or the picture: datasets' Image, undecoded, is a dict of its bytes or its path."""
    if isinstance(item, Mapping) and {"bytes", "path"} & set(item):
        return item["path"] if item.get("bytes") is None else item["bytes"]
    return item
