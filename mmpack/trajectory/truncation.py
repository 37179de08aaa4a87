"""`truncate`: a sample within a budget of tokens, cut between pictures and actions, never through one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_flag, check_name, check_whole
from mmpack.families import FAMILIES
from mmpack.layout.occurrences import occurring_media
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample, as_samples
from mmpack.trajectory.cut import (
    Piece,
    gone_keys,
    loss_within,
    media_after,
    media_pieces,
    pieces,
    prompt_stop,
    timed_media,
    without,
)
from mmpack.trajectory.trajectory import SCORES, Turn, ids_of

# ---- windows ----------------------------------------------------------------------------------------

WHAT = ("pictures", "turns")


@dataclass(frozen=True, eq=False)
class Context:
    """Context for the engine: expanded ids [C], and the media of its placeholders, in order."""

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
        >>> spans = [mp.schema.ModalitySpan(2, 4, "image", 0), mp.schema.ModalitySpan(7, 9, "image", 0)]
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


@dataclass(frozen=True)
class Truncated:
    """A sample that fits, and what was cut out of the one given."""

    sample: Sample
    start: int  # tokens [start, stop) of the sample given are gone
    stop: int
    loss_tokens: int  # of them
    turns: tuple[int, ...]  # without a loss token left
    media: tuple[str, ...]  # cache keys of media that are gone
    scores: tuple[str, ...]  # "rewards: name" of each score that is gone

    @property
    def tokens(self) -> int:
        """Number of tokens that are gone."""
        return self.stop - self.start


def truncate(
    sample: Sample,
    max_tokens: int,
    side: str = "right",
    *,
    keep: int | None = None,
    instead_ids: Sequence[int] | np.ndarray = (),
    changed_context: bool = False,
) -> Truncated:
    """Cut `sample` to at most `max_tokens`, between pieces: pictures, responses and observations stay whole.

    Args:
        side: "right" drops the last turns: the sample ends with the last response that fits. "left" drops the oldest
            turns, from `keep` on, up to the start of an observation.
        keep: tokens of the beginning that stay; None: the prompt, up to the first response or observation. With another
            number, cuts to the left may also end at a picture or a text of the prompt.
        instead_ids: text ids that stand in for what was cut on the left, such as "[earlier steps left out]".
        changed_context: cut on the left though loss tokens remain. The policy sampled them with the history that is cut
            away, so `rollout_logprobs` are of another context; `metadata["changed_context"]` says so.

    Returns: Truncated; with `tokens` 0 where the sample fits. Raises: ArgumentError where no such cut fits.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> spans = [mp.LossSpan(1, 3, turn=0), mp.LossSpan(4, 6, turn=1)]
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", np.arange(6), [], [], spans)
        >>> cut = mp.trajectory.truncate(sample, 5)
        >>> cut.sample.input_ids.tolist(), cut.tokens, cut.turns
        ([0, 1, 2], 3, (1,))
    """
    (sample,) = as_samples([sample], "truncate")
    check_whole("truncate", "max_tokens", max_tokens)
    check_name("truncate", "side", side, ("left", "right"))
    check_flag("truncate", "changed_context", changed_context)
    instead = text_ids("truncate", "instead_ids", instead_ids, sample)
    if len(sample) <= max_tokens:
        return Truncated(sample, 0, 0, 0, (), (), ())
    parts = pieces(sample)
    head = prompt_stop(parts)
    if keep is not None:
        check_whole("truncate", "keep", keep, least=0)
        head = _kept_head(keep, parts, sample)
    if side == "right":
        ends = [p.stop for p in parts if p.kind == "response" and head <= p.stop <= max_tokens]
        if not ends:
            _refuse(sample, max_tokens, "no response ends within the budget", head)
        start, stop, instead = ends[-1], len(sample), instead[:0]
    else:
        start, stop = head, _left_stop(sample, parts, head, max_tokens - len(instead), keep)
        rest = loss_within(sample, stop, len(sample))
        if rest and not changed_context:
            raise ArgumentError(
                f"truncate: {sample.sample_id!r:.60} has {rest} loss tokens after the cut, which the policy "
                "sampled with the removed context. Fix: pass side='right', or changed_context=True"
            )
    out = without(sample, start, stop, instead)
    if side == "left":
        out.metadata = {**out.metadata, "changed_context": {"cut": [start, stop]}}
    else:
        out.finish_reason = None
    left = {s.turn for s in out.loss_spans}
    gone = sorted({s.turn for s in sample.loss_spans if s.turn is not None} - left)
    return Truncated(
        out,
        start,
        stop,
        sample.num_loss_tokens - out.num_loss_tokens,
        tuple(gone),
        tuple(gone_keys(sample, out.media)),
        tuple(_gone_scores(sample, out)),
    )


def _kept_head(keep: int, parts: list[Piece], sample: Sample) -> int:
    inside = next((p for p in parts if p.start < keep < p.stop and p.kind != "text"), None)
    if inside is not None or keep > len(sample):
        where = (
            "beyond the sample"
            if inside is None
            else f"in a {inside.kind}, [{inside.start}, {inside.stop})"
        )
        raise ArgumentError(
            f"truncate: keep is {keep}, which lies {where}. Fix: keep whole pieces (mp.trajectory.pieces lists them)"
        )
    return keep


def _left_stop(sample: Sample, parts: list[Piece], head: int, budget: int, keep: int | None) -> int:
    """The first place behind `head` that the rest may begin at and fits."""
    kinds = ("observation",) if keep is None else ("observation", "medium", "text")
    starts = [p.start for p in parts if p.kind in kinds and p.start > head]
    stop = next((p for p in starts if head + len(sample) - p <= budget), None)
    if stop is None:
        last = (
            f"the newest part that can't be cut begins at token {starts[-1]}"
            if starts
            else ("there is no observation to begin the rest with")
        )
        _refuse(sample, budget, last, head)
    assert stop is not None
    return stop


def _refuse(sample: Sample, budget: int, why: str, head: int) -> None:
    raise ArgumentError(
        f"truncate: {sample.sample_id!r:.60} has {len(sample)} tokens, of which the first {head} are kept, and "
        f"can't be cut to {budget} between pictures and actions: {why}. Fix: raise max_tokens, or drop it"
    )


def _gone_scores(sample: Sample, out: Sample) -> list[str]:
    gone = []
    for name in SCORES:
        left = [s.name for s in getattr(out, name) or ()]
        for score in getattr(sample, name) or ():
            if score.name in left:
                left.remove(score.name)
            else:
                gone.append(f"{name}: {score.name}")
    return gone
