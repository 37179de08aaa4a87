"""Which samples are drawn: the first so many, by id or by trajectory; and the options that page and figure share."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, check_whole, kind_of
from mmpack.schema.sample import Sample


@dataclass(frozen=True)
class Chosen:
    """`samples` to draw; `more`: whether there are others that the limit left out."""

    samples: list[Sample]
    more: bool

    @property
    def note(self) -> str:
        return f"The first {len(self.samples)} samples; there are more." if self.more else ""


def choose(
    samples: Iterable[Sample],
    what: str,
    limit: int,
    sample_ids: Collection[str] = (),
    trajectory_ids: Collection[str] = (),
) -> Chosen:
    """At most `limit` samples; where ids are given only those, of samples and trajectories together.

    Reads no further than it must. Raises: ArgumentError for a limit below 1, for what is no sample, for an id that is
    not there; TraceError for fields of the wrong type.
    """
    check_whole(what, "limit", limit)
    if not isinstance(samples, Iterable) or isinstance(samples, (str, bytes, Mapping)):
        raise ArgumentError(
            f"{what}: samples is {kind_of(samples)}, expected Samples. Fix: pass [sample], or mp.read_trace(path)"
        )
    found: list[Sample] = []
    left_samples, left_trajectories = set(sample_ids), set(trajectory_ids)
    every = not (left_samples or left_trajectories)
    asked = set(trajectory_ids)
    for i, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise ArgumentError(
                f"{what}: samples[{i}] is {kind_of(sample)}, expected a Sample. Fix: pass mp.Sample.from_dict(record)"
            )
        if not (every or sample.sample_id in left_samples or sample.trajectory_id in asked):
            continue
        if len(found) == limit:
            return Chosen(found, True)
        left_samples.discard(sample.sample_id)
        left_trajectories.discard(str(sample.trajectory_id))
        found.append(_checked(sample, f"{what}: samples[{i}]"))
        if not (every or asked or left_samples):
            break
    for kind, left in (("sample", left_samples), ("trajectory", left_trajectories)):
        if left:
            raise ArgumentError(
                f"{what}: there is no {kind} {sorted(left)[0]!r:.80}. Fix: name a {kind}_id of the trace"
            )
    return Chosen(found, False)


def _checked(sample: Sample, where: str) -> Sample:
    """The sample with fields of the right types; numbers that are not finite stay, to be seen. Raises: TraceError."""
    try:
        return Sample.from_dict(sample.to_dict(numpy=True), where)
    except TraceError as error:
        if error.code == "MM009":
            return sample
        raise


@dataclass(frozen=True)
class Options:
    """What a page and a figure of samples are drawn with: see `view.html`."""

    media_root: str | os.PathLike[str] | None
    pictures: Mapping[str, np.ndarray] | None
    tokenizer: Any
    title: str


def checked_options(
    what: str, media_root: Any, pictures: Any, tokenizer: Any, title: Any
) -> Options:
    """Raises: ArgumentError for an option of another kind."""
    if media_root is not None and not isinstance(media_root, (str, os.PathLike)):
        raise ArgumentError(
            f"{what}: media_root is {kind_of(media_root)}, expected a folder. Fix: pass its path"
        )
    if media_root is not None and not os.path.isdir(media_root):
        raise ArgumentError(
            f"{what}: media_root {os.fspath(media_root)!r:.120} is no folder. Fix: name the folder of all sources"
        )
    if pictures is not None and not isinstance(pictures, Mapping):
        raise ArgumentError(
            f"{what}: pictures is {kind_of(pictures)}, expected a mapping. Fix: pass content_hash -> pixels"
        )
    for key, pixels in (pictures or {}).items():
        ok = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
        if not (ok and pixels.ndim in (3, 4) and pixels.shape[-1] == 3 and pixels.size):
            raise ArgumentError(
                f"{what}: pictures[{key!r:.80}] is {kind_of(pixels)}, expected uint8 [h, w, 3] or [n, h, w, 3]. "
                "Fix: pass RGB pixels"
            )
    if title is not None and not isinstance(title, str):
        raise ArgumentError(f"{what}: title is {kind_of(title)}, expected a text. Fix: pass a str")
    return Options(media_root, pictures, tokenizer, title or "samples")
