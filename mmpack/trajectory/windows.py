"""`window`: the context of the last k screenshots, made of whole pictures, observations and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_name, check_whole
from mmpack.families import FAMILIES
from mmpack.layout.occurrences import occurring_media
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample, as_samples
from mmpack.trajectory.cut import media_after
from mmpack.trajectory.piece import media_pieces, pieces, prompt_stop, timed_media
from mmpack.trajectory.trajectory import Turn, ids_of

WHAT = ("pictures", "turns")


@dataclass(frozen=True, eq=False)
class Context:
    """What to give the engine: expanded ids [C], and the media of its placeholders, in order."""

    input_ids: np.ndarray
    media: list[Medium]
    dropped: list[tuple[int, int]]  # tokens of the history that are not in it

    @classmethod
    def of(cls, sample: Sample) -> Context:
        """All of a sample: what the processor rendered, or appended to. Raises: ArgumentError."""
        (sample,) = as_samples([sample], "Context.of")
        return cls(sample.input_ids, occurring_media(sample), [])

    def turn(self, response_ids: Any, **fields: Any) -> Turn:
        """The Turn of what the policy answered to this context; `fields` are Turn's."""
        return Turn(self.input_ids, response_ids, list(self.media), **fields)


def window(
    history: Sample,
    last: int,
    *,
    what: str = "pictures",
    dropped_ids: Sequence[int] | np.ndarray = (),
    pinned: int = 0,
) -> Context:
    """The context of the last `last` pictures of `history`.

    Args:
        history: all that was said so far, as `processor.append` makes it, the newest observation at its end.
        last: pictures or videos that stay, counted from the end.
        what: "pictures": older pictures go, with the markers around them, the text of all turns stays. "turns": older
            turns go whole, action and observation; the prompt and its pictures stay.
        dropped_ids: text ids that stand in for each dropped picture, or once for the dropped turns.
        pinned: pictures at the beginning that always stay, such as the task's. Only for "pictures".

    Raises: ArgumentError.

    Example: each picture is two tokens here, and its markers.
        >>> import numpy as np, mmpack as mp
        >>> medium = mp.Medium("a", "image", "key", (1, 2, 4), 2)
        >>> pad, start, end = 151655, 151652, 151653
        >>> ids = np.array([1, start, pad, pad, end, 2, start, pad, pad, end, 3])
        >>> spans = [mp.ModalitySpan(2, 4, "image", 0), mp.ModalitySpan(7, 9, "image", 0)]
        >>> history = mp.Sample("h", "p", "qwen2_5_vl", ids, [medium], spans, [])
        >>> context = mp.trajectory.window(history, 1, dropped_ids=[7])
        >>> context.input_ids.tolist(), context.dropped
        ([1, 7, 2, 151652, 151655, 151655, 151653, 3], [(1, 5)])
    """
    (history,) = as_samples([history], "window")
    check_whole("window", "last", last, least=0)
    check_whole("window", "pinned", pinned, least=0)
    check_name("window", "what", what, WHAT)
    instead = text_ids("window", "dropped_ids", dropped_ids, history)
    places = media_pieces(history)
    if what == "turns":
        if pinned:
            raise ArgumentError(
                "window: pinned is for what='pictures'. Fix: leave it out; the prompt's pictures stay anyway"
            )
        return _of_turns(history, places, last, instead)
    gone = places[pinned : max(pinned, len(places) - last)]
    timed = timed_media(history) & {start for start, _ in gone}
    if timed:
        raise ArgumentError(
            f"window: the video at token {min(timed)} of {history.sample_id!r:.60} has its seconds as text "
            "around it, which would stay behind. Fix: pass what='turns', or pin it"
        )
    out, end = [], 0
    for start, stop in gone:
        out += [history.input_ids[end:start], instead]
        end = stop
    ids = np.concatenate([*out, history.input_ids[end:]])
    media = occurring_media(history)
    kept = media[:pinned] + media[pinned + len(gone) :]
    return Context(ids, kept, gone)


def _of_turns(
    history: Sample, places: list[tuple[int, int]], last: int, instead: np.ndarray
) -> Context:
    """The prompt, then all from the observation on that holds the oldest picture to keep."""
    parts = pieces(history)
    head = prompt_stop(parts)
    later = [start for start, _ in places if start >= head]
    starts = [p.start for p in parts if p.kind == "observation"]
    if len(later) <= last or not starts:
        return Context.of(history)
    first = later[-last] if last else starts[-1]
    stop = max((s for s in starts if s <= first), default=None)
    if stop is None:
        raise ArgumentError(
            f"window: the picture at token {first} of {history.sample_id!r:.60} lies in no observation. "
            "Fix: record observation_spans, or pass what='pictures'"
        )
    if stop <= head:
        return Context.of(history)
    if not last and later and later[-1] >= stop:
        raise ArgumentError(
            "window: the newest observation holds a picture, but last is 0. Fix: pass last=1, or what='pictures'"
        )
    ids = np.concatenate([history.input_ids[:head], instead, history.input_ids[stop:]])
    return Context(ids, media_after(history, head, stop), [(head, stop)])


def text_ids(what: str, name: str, given: Any, sample: Sample) -> np.ndarray:
    """int64 [n] without placeholders. Raises: ArgumentError."""
    ids = ids_of(what, name, given)
    if np.isin(ids, list(FAMILIES[sample.family].placeholder_ids.values())).any():
        raise ArgumentError(
            f"{what}: {name} holds a placeholder, but it replaces pictures by text. Fix: pass text ids"
        )
    return ids
