"""What only several samples show: samples under each other's ids, and turns that one side merged into one sample.

Each sample counts by digests of its ids without placeholders, of its response and of its media's contents. Only the
first MOST samples that differ, or have no partner, are looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mmpack.families import get_family
from mmpack.layout.runs import true_runs
from mmpack.parity.causes.turns import TELLING
from mmpack.schema.sample import Sample
from mmpack.schema.spans import covered

MOST = 2**14


@dataclass(frozen=True, slots=True)
class _Digests:
    text: bytes
    prompt: bytes
    response: bytes
    length: int  # of the response
    media: bytes | None  # None: a content is not known, or there are no media
    files: bytes | None
    turns: tuple[bytes, ...]  # of the text up to the end of each response


@dataclass(frozen=True)
class Across:
    """What was found of one sample, in place of what was found in it alone."""

    cause: str
    evidence: str
    left: str
    right: str


class Seen:
    """The samples that differ (both sides), and those without a partner (one side)."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[_Digests | None, _Digests | None]] = {}

    def add(self, sample_id: str, left: Sample | None, right: Sample | None) -> bool:
        """Whether the sample will be looked at."""
        if len(self.of) >= MOST or (left is None and right is None):
            return False
        self.of[sample_id] = _digests(left), _digests(right)
        return True

    def found(self) -> dict[str, Across]:
        """sample_id -> what was found, of the samples that others explain."""
        out = dict(self._merged())
        levels = (
            ("sample_order", "ids", lambda d: d.text, _other_text),
            ("sample_order", "response", lambda d: d.response, _other_response),
            ("sample_order", "ids and media", lambda d: d.media and d.text + d.media, _other_both),
            ("media_order", "media", lambda d: d.media, _other_media),
        )
        for cause, what, key, counts in levels:
            for sample_id, of, at in list(self._moved(key, counts, out)):
                places = [f"train has here the {what} of rollout's {of!r:.60}"] if of else []
                places += [f"train has the {what} of rollout here under {at!r:.60}"] if at else []
                shown = f"{what} of this sample", f"{what} of {of!r:.60}" if of else f"other {what}"
                out[sample_id] = Across(cause, "; ".join(places), *shown)
        return out

    def _moved(
        self,
        key: Callable[[_Digests], bytes | None],
        counts: Callable[[_Digests, _Digests], bool],
        done: dict[str, Across],
    ) -> Iterator[tuple[str, str | None, str | None]]:
        """(sample_id, whose train has here, where train has this one's) of what stands under another id.

        Both are known, or one at an end of such a chain.
        """
        keys: dict[str, tuple[bytes, bytes]] = {}
        for sample_id, (left, right) in self.of.items():
            if sample_id in done or left is None or right is None or not counts(left, right):
                continue
            a, b = key(left), key(right)
            if a is not None and b is not None and a != b:
                keys[sample_id] = a, b
        lefts = {a: sample_id for sample_id, (a, _) in keys.items()}
        rights = {b: sample_id for sample_id, (_, b) in keys.items()}
        full = {sample_id for sample_id, (a, b) in keys.items() if a in rights and b in lefts}
        for sample_id, (a, b) in keys.items():
            of, at = lefts.get(b), rights.get(a)
            if sample_id in full or {of, at} & full:
                yield sample_id, of, at

    def _merged(self) -> Iterator[tuple[str, Across]]:
        """Samples that hold several turns on one side, each of which is a sample on the other side; and these."""
        for whole in (0, 1):
            single = {
                digests[1 - whole].text: sample_id  # type: ignore[union-attr]
                for sample_id, digests in self.of.items()
                if digests[1 - whole] is not None and digests[whole] is None
            }
            side, other = ("rollout", "train") if whole == 0 else ("train", "rollout")
            for sample_id, digests in self.of.items():
                merged = digests[whole]
                if merged is None:
                    continue
                own = digests[1 - whole]
                found = [
                    sample_id if own is not None and t == own.text else single.get(t)
                    for t in merged.turns
                ]
                parts = [name for name in found if name is not None]
                if len(parts) < 2 or (own is not None and sample_id not in parts):
                    continue
                named = ", ".join(f"{p!r:.60}" for p in parts[:4])
                evidence = (
                    f"{side}'s {sample_id!r:.60} holds {len(parts)} turns that {other} has as samples of "
                    f"their own: {named}"
                )
                shown = (f"{len(parts)} turns in one sample", "a sample for each turn")
                for name in (sample_id, *parts):
                    yield (
                        name,
                        Across("merged_turns", evidence, *(shown if whole == 0 else shown[::-1])),
                    )


def _other_both(left: _Digests, right: _Digests) -> bool:
    return left.text != right.text and left.media != right.media


def _other_text(left: _Digests, right: _Digests) -> bool:
    return left.prompt != right.prompt or _telling(left, right)


def _other_response(left: _Digests, right: _Digests) -> bool:
    return _telling(left, right)


def _other_media(left: _Digests, right: _Digests) -> bool:
    one_file = left.files is not None and left.files == right.files  # decoded otherwise
    return left.text == right.text and not one_file


def _telling(left: _Digests, right: _Digests) -> bool:
    return min(left.length, right.length) >= TELLING


def _digests(sample: Sample | None) -> _Digests | None:
    if sample is None:
        return None
    placeholders = list(get_family(sample.family).placeholder_ids.values())
    kept = ~np.isin(sample.input_ids, placeholders)
    text = sample.input_ids[kept]
    loss = covered(sample.loss_spans, len(sample))[kept]
    runs = true_runs(loss)
    return _Digests(
        text=_digest(text),
        prompt=_digest(text[: runs[0][0]] if runs else text),
        response=_digest(text[loss]),
        length=int(loss.sum()),
        media=_named([m.content_hash for m in sample.media]),
        files=_named([m.file_hash for m in sample.media]),
        turns=tuple(_digest(text[:stop]) for _, stop in runs) if len(runs) > 1 else (),
    )


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, "<i8").data, digest_size=12).digest()


def _named(hashes: list[str | None]) -> bytes | None:
    known = bool(hashes) and all(hashes)
    return (
        hashlib.blake2b(" ".join(map(str, hashes)).encode(), digest_size=12).digest()
        if known
        else None
    )
