"""Two samples of one id, as causes are read from them: runs of placeholders, text tokens (all others), loss masks.

Masks and indices are over the tokens [L] of each side. Nothing is allocated by what a record claims, only by L.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mmpack.families import Family, get_family
from mmpack.layout.occurrences import Occurrence, occurrences
from mmpack.layout.runs import Runs, placeholder_runs
from mmpack.parity.frame_difference import FrameDifference
from mmpack.processors.views import VIEW
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import covered

EDGE = 2  # tokens of a turn's end (`<|im_end|>` and a newline), by which a span's edge may move
STAMP = 16  # tokens of a timestamp and of what opens a medium, at most
_DIGEST = re.compile("((?:sha256:)?[0-9a-f]{12})[0-9a-f]{52}")
# of a response that is the beginning of the other side's, where no finish_reason is `length`
LIMIT_OR_STOP = "cut at a limit, or by a stop string; possible: truncated, stop_token"
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Hit:
    """A cause, where it shows, and why it is this one.

    `at`: the rollout's token from which ids differ by it; None if they don't. `frames`: where two videos differ.
    `fix`: in place of the cause's.
    """

    cause: str
    field: str
    evidence: str
    left: str
    right: str
    index: int | None = None
    span: tuple[int, int] | None = None
    at: int | None = None
    frames: FrameDifference | None = None
    fix: str = ""


class Side:
    """One of the two samples."""

    def __init__(self, sample: Sample, name: str) -> None:
        self.sample = sample
        self.name = name
        self.family: Family = get_family(sample.family)
        self.ids = sample.input_ids

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def runs(self) -> Runs:
        return placeholder_runs(self.ids, self.family)

    @cached_property
    def placeholder(self) -> np.ndarray:
        return np.isin(self.ids, list(self.family.placeholder_ids.values()))

    @cached_property
    def loss(self) -> np.ndarray:
        """bool [L]: covered by a loss span."""
        return covered(self.sample.loss_spans, len(self))

    @cached_property
    def observed(self) -> np.ndarray:
        """bool [L]: covered by an observation span."""
        return covered(self.sample.observation_spans or [], len(self))

    @cached_property
    def claimed(self) -> np.ndarray:
        """bool [L]: covered by a modality span."""
        return covered(self.sample.modality_spans, len(self))

    def setting(self, *path: str) -> Any:
        """A setting of `processor`, None where it was not recorded."""
        value: Any = self.sample.processor
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def special_ids(self) -> set[int]:
        """Ids of the tokenizer's added tokens; empty where they weren't recorded."""
        special = self.setting("tokenizer", "special_ids")
        known = special.values() if isinstance(special, dict) else ()
        return {i for i in known if type(i) is int}

    @cached_property
    def openings(self) -> np.ndarray:
        """bool [L]: ids that open a turn; none where the family's are not known."""
        return np.isin(self.ids, self.family.turn_ids)

    @cached_property
    def head(self) -> int:
        """How many ids precede the first turn, such as BOS."""
        return first_run(np.isin(self.ids, self.family.first_ids))

    @cached_property
    def occurrences(self) -> list[Occurrence]:
        """Each place where a medium is shown; a video in text counts once."""
        return occurrences(self.sample)

    @cached_property
    def framed(self) -> list[Occurrence]:
        """The occurrences of videos that lie in the text frame by frame, timestamps between; cut at the ids' end.

        Where the marks of a video are known, up to its end: a time may follow the last frame.
        """
        return self._in_pieces("video")

    @cached_property
    def in_rows(self) -> list[Occurrence]:
        """The occurrences of images that lie in the text row by row; cut at the ids' end."""
        return self._in_pieces("image")

    @cached_property
    def viewed(self) -> list[tuple[int, int]]:
        """[start, stop) of each picture in views: from its first placeholder to the mark behind its last one."""
        out: list[tuple[int, int]] = []
        media = self.sample.media
        for start, stop, index in self.occurrences if self.family.views else ():
            view = view_of(media[index]) if index < len(media) else None
            if view and view[0] and out:
                out[-1] = (out[-1][0], stop + 1)
            elif view:
                out.append((start, stop + 1))
        return out

    def number_before(self, start: int) -> int:
        """Where the mark begins that opens a picture whose first placeholder is `start`, or the number before that."""
        names = self.setting("tokenizer", "special_ids")
        marks = None if self.family.views is None else self.family.views.number
        if marks is None:
            return start - 1
        known = names if isinstance(names, dict) else {}
        opens, closes = (known.get(name) for name in marks)
        before = self.ids[stamp_of(start) : start - 1].tolist()
        if not before or before[-1] != closes or opens not in before:
            return start - 1
        return start - 2 - before[::-1].index(opens)

    def _in_pieces(self, modality: str) -> list[Occurrence]:
        if not self.family.in_pieces(modality):
            return []
        spans = self.sample.modality_spans
        wanted = {s.media_index for s in spans if s.modality == modality}
        return [
            Occurrence(min(o.start, len(self)), self._end_of(o.stop), o.media_index)
            for o in self.occurrences
            if o.media_index in wanted
        ]

    def _end_of(self, stop: int) -> int:
        """Where what belongs to the video ends that has its last placeholder before `stop`."""
        stop = min(stop, len(self))
        if self.family.video_bounds is None:
            return stop
        ends = np.flatnonzero(self.ids[stop:] == self.family.video_bounds[1])
        return stop + int(ends[0]) if len(ends) else stop

    @cached_property
    def videos_in_text(self) -> dict[int, tuple[int, int]]:
        """[start, stop) of the first of the `framed` occurrences of each video, by media_index."""
        return {o.media_index: (o.start, o.stop) for o in reversed(self.framed)}

    @cached_property
    def markers(self) -> tuple[list[int], set[bool]]:
        """Vision start and end that stand around whole videos in text: their tokens, and whether videos have both.

        A video that has only one of the two was cut: it says nothing.
        """
        at: list[int] = []
        fenced: set[bool] = set()
        start, end = self.family.vision_start_id, self.family.vision_end_id
        for first, stop, _ in self.framed:
            low = stamp_of(first)
            stops = [*self.family.starts, *self.family.ends, *self.family.placeholder_ids.values()]
            before = np.flatnonzero(np.isin(self.ids[low : max(first - 1, low)], stops))
            opens = [low + int(k) for k in before[-1:] if self.ids[low + k] == start]
            closes = [stop + 1] if self.ids[stop : stop + 2].tolist() == [end, end] else []
            at += opens + closes
            if len(opens) == len(closes):
                fenced.add(bool(opens))
        return at, fenced

    def start_of(self, media_index: int) -> int | None:
        """First token of a medium."""
        starts = (s.start for s in self.sample.modality_spans if s.media_index == media_index)
        start = next(starts, None)
        return None if start is None else min(start, len(self))

    def tokens_of(self, medium: Medium) -> int:
        """By the merge size that was recorded, else the family's."""
        if medium.modality == "audio":
            return self.family.tokens_of("audio", medium.grid_thw)
        merge = self.setting(medium.modality, "merge_size")
        if self.family.tokens_by_size is not None:
            return medium.num_tokens
        if type(merge) is not int or merge <= 0:
            return self.family.vision_tokens(medium.grid_thw)
        t, h, w = medium.grid_thw
        return -(-t // self.family.pooled_frames) * (h // merge) * (w // merge)


class Pair:
    """The rollout's sample (left) and the trainer's (right)."""

    def __init__(self, left: Sample, right: Sample) -> None:
        self.left = Side(left, "rollout")
        self.right = Side(right, "train")

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.left, self.right

    @cached_property
    def text_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of each side's text tokens: all but placeholders and what lies between those of one medium.

        If a side has fewer runs of placeholders, the tokens that open and close media are left out as well, and so are
        those around whole videos in text if one side lacks them. If one was cut off within a medium, text counts
        up to that medium on both sides.
        """
        stops = self._cut or (len(self.left), len(self.right))
        same_runs = len(self.left.runs) == len(self.right.runs)
        out = []
        for side, stop in zip(self.sides, stops, strict=True):
            drop = side.placeholder.copy()
            if not same_runs or self.other_sound:
                family, sound = side.family, side.family.audio
                marks = [*family.starts, *family.ends]
                marks += [sound.start_id, sound.end_id] if sound else []
                drop = drop | np.isin(side.ids, marks)
            for first, last, _ in [*side.framed, *side.in_rows]:
                drop[first:last] = True
            for first, last in side.viewed:
                drop[side.number_before(first) if self.other_numbers else first : last] = True
            if self.other_markers:
                drop[side.markers[0]] = True
            out.append(np.flatnonzero(~drop[:stop]))
        return out[0], out[1]

    @cached_property
    def other_markers(self) -> bool:
        """Whether vision start and end stand around whole videos in text on one side, and on the other don't."""
        one, two = (side.markers[1] for side in self.sides)
        return len(one) == len(two) == 1 and one != two

    @cached_property
    def other_numbers(self) -> bool:
        """Whether numbers of pictures in the text differ: by a setting, or since one side has fewer."""
        one, two = (side.setting("image", "use_image_id") for side in self.sides)
        fewer = len(self.left.viewed) != len(self.right.viewed)
        return fewer or (None not in (one, two) and one != two)

    @cached_property
    def recut(self) -> bool:
        """Whether a picture that both sides have is cut into other views."""
        known = {m.content_hash: view_of(m) for m in self.left.sample.media if view_of(m)}
        return any(
            known.get(m.content_hash, view) != view
            for m in self.right.sample.media
            if (view := view_of(m)) and m.content_hash
        )

    @cached_property
    def other_sound(self) -> bool:
        """Whether a video's sound lies among its placeholders on one side, and apart from them on the other."""
        one, two = (
            any(s.chunk is not None for s in side.sample.modality_spans) for side in self.sides
        )
        both = ({s.modality for s in side.sample.modality_spans} for side in self.sides)
        return one != two and all(kinds >= {"video", "audio"} for kinds in both)

    @cached_property
    def _cut(self) -> tuple[int, int] | None:
        """First token of the medium, on both sides, in which one side ends and the other doesn't."""
        ends = [
            bool(len(side)) and side.placeholder[-1] and not side.loss[-1] for side in self.sides
        ]
        if ends[0] == ends[1]:
            return None
        k = len(self.sides[ends.index(True)].runs) - 1
        if any(k >= len(side.runs) for side in self.sides):
            return None
        return int(self.left.runs.starts[k]), int(self.right.runs.starts[k])

    @cached_property
    def text_ids(self) -> tuple[np.ndarray, np.ndarray]:
        return self.left.ids[self.text_tokens[0]], self.right.ids[self.text_tokens[1]]

    @cached_property
    def text_loss(self) -> tuple[np.ndarray, np.ndarray]:
        return self.left.loss[self.text_tokens[0]], self.right.loss[self.text_tokens[1]]

    @cached_property
    def common(self) -> tuple[int, int]:
        """How many text tokens at the beginning and at the end are the same on both sides."""
        a, b = self.text_ids
        prefix = common_prefix(a, b)
        rest = min(len(a), len(b)) - prefix
        suffix = common_prefix(a[len(a) - rest :][::-1], b[len(b) - rest :][::-1])
        return prefix, suffix


def view_of(medium: Medium) -> list[int] | None:
    """[k, rows, columns] of slices, of a picture's view; the whole picture's k is 0."""
    view = medium.metadata.get(VIEW)
    return view if isinstance(view, list) and len(view) == 3 else None


def stamp_of(start: int) -> int:
    """The first token that may belong to the timestamp before a video whose first placeholder is `start`."""
    return max(start - STAMP, 0)


def first_run(mask: np.ndarray) -> int:
    """How many values are true before the first that is not."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    unlike = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(unlike[0]) if len(unlike) else shorter


def possible(*causes: str) -> str:
    return "possible: " + ", ".join(causes)


def show_ids(ids: np.ndarray) -> str:
    head = ", ".join(str(i) for i in ids[:6])
    return f"ids [{head}{', ...' if len(ids) > 6 else ''}] ({len(ids)})" if len(ids) else "no ids"


def show(value: Any) -> str:
    """A short picture of a recorded value."""
    if value is None:
        return "none"
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    if digest := _DIGEST.fullmatch(text):
        return f"{digest[1]}..."
    return text if len(text) <= 48 else f"{text[:45]}..."
