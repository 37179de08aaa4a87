"""Media that differ: which are missing, which lie elsewhere or under another's key, and what was done to the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mmpack.parity.causes.alike import (
    both,
    described,
    differ,
    differing,
    known_as_one,
    one_file,
    same_medium,
)
from mmpack.parity.causes.audio import audio_causes
from mmpack.parity.causes.frame_choice import OF_SECONDS, first_frame_difference, unlike_stamps
from mmpack.parity.causes.images import image_causes
from mmpack.parity.causes.looks import alike
from mmpack.parity.causes.pair import Decode, Hit, Pair, Side, possible, stamp_of, view_of
from mmpack.parity.causes.settings import decisive
from mmpack.parity.causes.videos import video_causes
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.frame_difference import FrameDifference
from mmpack.schema.media import Medium

# what the first differing frame belongs to
_OF_FRAMES = (*OF_SECONDS, "frame_pixels", UNKNOWN)

_OF_PIXELS = ("alpha", "jpeg_reencode")  # what no size, and so no token, follows from

T = TypeVar("T")


def media_hits(pair: Pair, decode: Decode | None) -> list[Hit]:
    """One hit for each cause and medium."""
    hits: dict[tuple[str, int | None], Hit] = {}
    matches = matched_media(pair.left.sample.media, pair.right.sample.media)
    for hit in [
        *_missing(pair, matches),
        *_fewer_showings(pair, matches),
        *_unlike(pair, matches),
        *_stamps(pair, matches, decode),
        *_cache_keys(pair),
    ]:
        hits.setdefault((hit.cause, hit.index), hit)
    return list(hits.values())


def matched_media(left: list[Medium], right: list[Medium]) -> list[tuple[int, int]] | None:
    """Pairs of indices of what is the same medium; None if one list can't be the other with some dropped."""
    groups = [_pictures(media) for media in (left, right)]
    if len(groups[0]) < len(left) or len(groups[1]) < len(right):
        wholes = (
            [media[g[0]] for g in side] for media, side in zip((left, right), groups, strict=True)
        )
        found = matched_media(*wholes)
        pairs = [(groups[0][i], groups[1][j]) for i, j in found or ()]
        # views that were cut otherwise have no partners, but for the whole picture
        cut = ((a, b) if len(a) == len(b) else (a[:1], b[:1]) for a, b in pairs)
        return None if found is None else [two for pair in cut for two in zip(*pair, strict=True)]
    if len(left) == len(right):
        return [(i, i) for i in range(len(left))]
    hashed = all(m.content_hash for m in left + right)
    name = "content_hash" if hashed else "cache_key"
    for same in (
        lambda a, b: getattr(a, name) == getattr(b, name),
        lambda a, b: a.media_id == b.media_id,
        lambda a, b: (
            known_as_one(a, b)
            or bool(a.content_hash and a.content_hash == b.content_hash)
            or alike(a, b)
        ),
    ):
        if matches := _subsequence(left, right, same):
            return matches
    return None if left and right else []


def _subsequence(
    a: list[T], b: list[T], same: Callable[[T, T], Any]
) -> list[tuple[int, int]] | None:
    """Pairs of indices if the shorter list is the longer one with some left out."""
    few, many = (a, b) if len(a) < len(b) else (b, a)
    out: list[tuple[int, int]] = []
    j = 0
    for i, key in enumerate(few):
        while j < len(many) and not same(key, many[j]):
            j += 1
        if j == len(many):
            return None
        out.append((i, j) if few is a else (j, i))
        j += 1
    return out


def _missing(pair: Pair, matches: list[tuple[int, int]] | None) -> Iterator[Hit]:
    left, right = pair.left.sample.media, pair.right.sample.media
    counts = f"{len(left)} media against {len(right)}"
    shown_counts = f"{len(left)} media", f"{len(right)} media"
    if matches is None:
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if _other(a, b)), 0)
        start = pair.left.start_of(at) or 0
        evidence = f"{counts}, and neither list is the other with some left out; "
        evidence += possible("dropped_image", "cache_key")
        yield Hit(UNKNOWN, "media", evidence, *shown_counts, at, at=start)
        return
    for k, (side, other) in enumerate((pair.sides, pair.sides[::-1])):
        pictures = {i: group for group in _pictures(side.sample.media) for i in group}
        kept = {i for match in matches for i in pictures[match[k]]}
        lost = [i for i in range(len(side.sample.media)) if i not in kept]
        if lost and len(side.occurrences) == len(other.occurrences) >= len(side.sample.media):
            shown = _in_its_place(side, other, lost[0], {m[1 - k]: m[k] for m in matches})
            evidence = f"{counts}: {other.name} lacks media[{lost[0]}] of {side.name}, and shows "
            if shown is None:
                evidence += f"another in its place; {possible('media_order', 'cache_key')}"
            else:
                evidence += f"{side.name}'s media[{shown}] in its place"
            cause = UNKNOWN if shown is None else "media_order"
            at = side.start_of(lost[0]) or 0
            yield Hit(cause, "media", evidence, *shown_counts, lost[0], at=at)
        elif lost:
            medium = side.sample.media[lost[0]]
            names = ", ".join(f"media[{i}]" for i in lost[:4])
            picture = described(medium)
            opened = side.start_of(lost[0]) or 0
            if view_of(medium) and side.family.views:
                opened = side.number_before(opened) + 1
            chunks = [s.start for s in side.sample.modality_spans if s.chunk is not None]
            if medium.modality == "audio" and chunks:  # its mark stands before the video
                opened = min(opened, chunks[0] - 1)
            evidence = f"{counts}: {other.name} lacks {names} of {side.name}"
            one, two = (picture, "no such medium")[:: 1 if k == 0 else -1]
            at = max(opened - 1, 0)  # with the token that opens the medium
            yield Hit("dropped_image", "media", evidence, one, two, lost[0], at=at)


def _in_its_place(side: Side, other: Side, lost: int, partners: dict[int, int]) -> int | None:
    """The medium of `side` that `other` shows where `side` shows the one that `other` lacks; None if it isn't known.

    One cache_key on both sides for what is shown: a key that is too short for two media would differ.
    """
    for mine, theirs in zip(side.occurrences, other.occurrences, strict=True):
        if mine.media_index == lost:
            k = partners.get(theirs.media_index)
            media, others = side.sample.media, other.sample.media
            if k is None or media[k].cache_key != others[theirs.media_index].cache_key:
                return None
            return k
    return None


def _fewer_showings(pair: Pair, matches: list[tuple[int, int]] | None) -> Iterator[Hit]:
    """A medium that both sides have, and that one of them shows less often."""
    if not matches or len(pair.left.occurrences) == len(pair.right.occurrences):
        return
    of = [dict(zip((m[k] for m in matches), range(len(matches)), strict=True)) for k in (0, 1)]
    shown = [
        [of[k][o.media_index] for o in side.occurrences if o.media_index in of[k]]
        for k, side in enumerate(pair.sides)
    ]
    if len(shown[0]) == len(shown[1]) or not all(shown):
        return
    kept = _subsequence(shown[0], shown[1], int.__eq__)
    if kept is None:
        return
    for k, (side, other) in enumerate(zip(pair.sides, pair.sides[::-1], strict=True)):
        left_out = sorted(set(range(len(shown[k]))) - {match[k] for match in kept})
        if not left_out:
            continue
        match = matches[shown[k][left_out[0]]]
        starts = [o.start for o in side.occurrences if o.media_index == match[k]]
        nth = shown[k][: left_out[0]].count(shown[k][left_out[0]])
        counts = [shown[n].count(shown[k][left_out[0]]) for n in (0, 1)]
        evidence = f"{other.name} lacks occurrence {nth + 1} of media[{match[k]}] of {side.name}"
        one, two = (f"shown {count} times" for count in counts)
        at = max(starts[nth] - 1, 0) if nth < len(starts) else 0
        yield Hit("dropped_image", "media", evidence, one, two, match[0], at=at)


def _pictures(media: list[Medium]) -> list[list[int]]:
    """The indices of media by picture: the views of one are together."""
    out: list[list[int]] = []
    for i, medium in enumerate(media):
        view = view_of(medium)
        if view and view[0] and out:
            out[-1].append(i)
        else:
            out.append([i])
    return out


def _of_another_whole(pair: Pair, i: int, j: int) -> bool:
    """Whether both are slices of pictures whose contents differ, which is said of the whole pictures."""
    media = pair.left.sample.media, pair.right.sample.media
    (k, *_), (n, *_) = view_of(media[0][i]) or [0], view_of(media[1][j]) or [0]
    return k > 0 and k == n and differ(media[0][i - k].content_hash, media[1][j - n].content_hash)


def _other(a: Medium, b: Medium) -> bool:
    return differ(a.content_hash, b.content_hash) or a.cache_key != b.cache_key


def _unlike(pair: Pair, matches: list[tuple[int, int]] | None) -> Iterator[Hit]:
    for i, j in matches or ():
        a, b = pair.left.sample.media[i], pair.right.sample.media[j]
        if same_medium(a, b) or _of_another_whole(pair, i, j):
            continue
        frames = first_frame_difference(pair, i, j) if a.modality == b.modality == "video" else None
        if _reused(a, b):
            causes = [("cache_key", f"{_one_key(i, j)}, {both(a, b, 'content_hash')}")]
        elif moved := _moved(pair, i, j, a, b):
            causes = [("media_order", moved)]
        elif a.modality != b.modality:
            causes = [(UNKNOWN, f"media[{i}] is {a.modality} in rollout, {b.modality} in train")]
        elif a.modality == "video":
            causes = list(video_causes(pair, a, b, frames))
            if family := decisive(pair, "video"):
                of_sizes = (UNKNOWN, "video_budget", "max_pixels", "model_family")
                causes = [cause for cause in causes if cause[0] not in of_sizes]
                causes.append(("model_family", family))
        elif a.modality == "audio":
            causes = list(audio_causes(pair, a, b))
        else:
            causes = list(image_causes(pair, a, b))
        resized = tuple(a.grid_thw) != tuple(b.grid_thw)
        start = pair.left.start_of(i)
        if i in pair.left.videos_in_text:  # its timestamps are in the text
            start, resized = stamp_of(pair.left.videos_in_text[i][0]), True
        if view_of(a):  # the text before it may number pictures
            start, resized = stamp_of(start or 0), True
        for cause, evidence in causes:
            at = (start or 0) if resized and cause not in _OF_PIXELS else None
            yield _hit(cause, evidence, a, b, i, at, frames if cause in _OF_FRAMES else None)


def _stamps(
    pair: Pair, matches: list[tuple[int, int]] | None, decode: Decode | None
) -> Iterator[Hit]:
    """Timestamps that differ in the text of a video, though nothing recorded of its frames does."""
    for i, j in matches or ():
        if i not in pair.left.videos_in_text or j not in pair.right.videos_in_text:
            continue
        a, b = pair.left.sample.media[i], pair.right.sample.media[j]
        if found := unlike_stamps(pair, i, j, decode, same_medium(a, b)):
            cause, evidence = found
            yield _hit(cause, evidence, a, b, i, stamp_of(pair.left.videos_in_text[i][0]))


def _moved(pair: Pair, i: int, j: int, a: Medium, b: Medium) -> str | None:
    """Evidence that one side has, in a medium's place, another one of the other side's."""
    if not differ(a.content_hash, b.content_hash) or one_file(a, b):
        return None
    for side, other, mine, content in (
        (pair.left, pair.right, i, b.content_hash),
        (pair.right, pair.left, j, a.content_hash),
    ):
        for k, medium in enumerate(side.sample.media):
            if medium.content_hash == content:
                return f"{other.name} has the content of {side.name}'s media[{k}] in place of media[{mine}]"
    return None


def _reused(a: Medium, b: Medium) -> bool:
    """One key for two contents: the key is the cause of whatever else differs."""
    return a.cache_key == b.cache_key and differ(a.content_hash, b.content_hash)


def _cache_keys(pair: Pair) -> Iterator[Hit]:
    """One key for two contents or grids, across the two sides."""
    mine = {m.cache_key: (i, m) for i, m in reversed(list(enumerate(pair.left.sample.media)))}
    for j, b in enumerate(pair.right.sample.media):
        if b.cache_key not in mine:
            continue
        i, a = mine[b.cache_key]
        if unlike := differing(a, b, "content_hash", "grid_thw"):
            evidence = f"{_one_key(i, j)}, " + "; ".join(both(a, b, name) for name in unlike)
            yield _hit("cache_key", evidence, a, b, i)


def _hit(
    cause: str,
    evidence: str,
    a: Medium,
    b: Medium,
    index: int,
    at: int | None = None,
    frames: FrameDifference | None = None,
) -> Hit:
    """A cause by which a medium of the rollout, at `index`, differs from the trainer's."""
    return Hit(cause, "media", evidence, described(a), described(b), index, at=at, frames=frames)


def _one_key(i: int, j: int) -> str:
    return f"rollout media[{i}] and train media[{j}] have one cache_key"
