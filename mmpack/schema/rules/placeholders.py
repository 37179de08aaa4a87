"""MM101, MM103 to MM106, MM110, MM111, MM117: modality spans, the placeholders below them and their media."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.items import Items
from mmpack.schema.columns.numbers import same_slices
from mmpack.schema.columns.table import Table
from mmpack.schema.media import Medium
from mmpack.schema.rules.media import grids_of, tokens_of
from mmpack.schema.rules.topic import Found, Topic, before
from mmpack.schema.sample import Sample
from mmpack.schema.spans import MODALITIES, is_placeholder

FAR = 2**40  # beyond any index
CACHED_IDS = 2**15


def problems(sample: Sample, family: Family) -> Found:
    ids, spans = sample.input_ids, sample.modality_spans
    covered = np.zeros(len(ids), dtype=bool)
    tokens_of: dict[int, int] = {}
    frames_of: dict[int, list[int | None]] = {}
    chunks_of: dict[int, list[tuple[int, int]]] = {}
    end, newest = 0, -1
    pads = family.placeholder_ids
    for i, s in enumerate(spans):
        field, at = f"modality_spans[{i}]", (s.start, s.stop)
        if not end <= s.start < s.stop <= len(ids):
            yield "MM103", field, f"[{s.start}, {s.stop}) after {end}, of {len(ids)} tokens", at
            continue
        end = s.stop
        covered[s.start : s.stop] = True
        pad = pads.get(s.modality, -1)  # -1: the family has no such placeholders
        wrong = ids[s.start : s.stop] != pad
        if wrong.any():
            token = s.start + int(wrong.argmax())
            yield "MM105", field, f"has id {ids[token]} at token {token}", at
        if s.media_index >= len(sample.media):
            message = f"names media[{s.media_index}], there are {len(sample.media)}"
            yield "MM106", field, message, at
            continue
        medium = sample.media[s.media_index]
        if medium.modality != s.modality:
            message = f"is {s.modality}, media[{s.media_index}] is {medium.modality}"
            yield "MM106", field, message, at
        if s.media_index > newest + 1:
            yield "MM110", field, f"names media[{s.media_index}] before media[{newest + 1}]", at
        newest = max(newest, s.media_index)
        if family.in_pieces(s.modality):
            frames_of.setdefault(s.media_index, []).append(s.frame)
            tokens_of[s.media_index] = tokens_of.get(s.media_index, 0) + s.stop - s.start
        elif s.chunk is not None:
            chunks_of.setdefault(s.media_index, []).append((s.chunk, s.stop - s.start))
        elif s.stop - s.start != (expected := family.tokens_in(medium)):
            message = (
                f"has {s.stop - s.start} tokens, media[{s.media_index}] of grid "
                f"{list(medium.grid_thw)} needs {expected} after merging"
            )
            yield "MM101", field, message, at
    for index, frames in frames_of.items():
        modality, grid = sample.media[index].modality, sample.media[index].grid_thw
        pieces = max(family.spans_of(modality, grid), 1)
        if len(frames) % pieces or any(f != k % pieces for k, f in enumerate(frames)):
            unit = "temporal patches" if modality == "video" else "rows or tiles"
            message = f"has frame spans {frames[:8]}, its grid has {pieces} {unit}"
            yield "MM111", f"media[{index}]", message, None
        elif tokens_of[index] != family.vision_tokens(grid) * (len(frames) // pieces):
            message = f"has {tokens_of[index]} tokens in frames, its grid {list(grid)} needs others"
            yield "MM101", f"media[{index}]", message, None
    for index, chunks in chunks_of.items():
        message = _wrong_chunks(chunks, family, sample.media[index])
        if message:
            yield "MM117", f"media[{index}]", message, None
    stray = is_placeholder(ids, family) & ~covered
    if stray.any():
        token = int(np.argmax(stray))
        message = f"has placeholder {ids[token]} at token {token} outside any modality span"
        yield "MM104", "input_ids", message, (token, token + 1)


def _wrong_chunks(chunks: list[tuple[int, int]], family: Family, medium: Medium) -> str:
    """What is wrong with the pieces (number, tokens) of a video with its sound, or of the sound; each 0 begins anew."""
    needed = family.tokens_of(medium.modality, medium.grid_thw)
    numbers = [number for number, _ in chunks]
    begins = [k for k, number in enumerate(numbers) if number == 0]
    if family.audio is None or medium.modality == "image" or not begins or begins[0] != 0:
        return f"has pieces {numbers[:8]}, which begin at no 0"
    for a, b in zip(begins, [*begins[1:], len(chunks)], strict=True):
        tokens = sum(n for _, n in chunks[a:b])
        if numbers[a:b] != list(range(b - a)) or tokens != needed:
            return f"has pieces {numbers[a:b][:8]} of {tokens} tokens, its grid {list(medium.grid_thw)} needs {needed}"
    return ""


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    family, ids = table.family, table.ids
    media, spans = table.items("media"), table.items("modality_spans")
    ok = media.good & spans.good
    grids = grids_of(media)
    tokens = tokens_of(family, media, grids)

    row, start, stop = spans.row, spans.numbers("start"), spans.numbers("stop")
    index = spans.numbers("media_index")
    wrong = (start < before(row, stop)) | (start >= stop) | (stop > ids.lengths[row])
    newest = np.maximum.accumulate(row * FAR + index) - row * FAR
    wrong |= (index >= media.counts[row]) | (index > before(row, newest, -1) + 1)
    ok[row[wrong]] = False
    kept = ok[row]
    row, start, stop, index = row[kept], start[kept], stop[kept], index[kept]
    code = _bits(spans)[kept]
    medium = media.first[row] + index
    ok[row[code != _bits(media)[medium]]] = False
    framed = np.isin(code, [_bit(m) for m in family.placeholder_ids if family.in_pieces(m)])
    ok[spans.row[spans.numbers("chunk") >= 0]] = False  # a video with its sound: left to `problems`
    ok[row[~framed & (stop - start != tokens[medium])]] = False
    frame = spans.numbers("frame")[kept]
    t, h = (np.maximum(grids[:, k], 1).astype(np.int64) for k in (0, 1))
    rows = t * (1 if family.row_end_id is None else np.maximum(h // family.spatial_merge_size, 1))
    frames = -(-t // family.pooled_frames)
    pieces = np.where(_bits(media) == _bit("video"), frames, rows)
    unlike = _wrong_frames(frame[framed], medium[framed], (stop - start)[framed], pieces, tokens)
    ok[media.row[unlike]] = False

    first = ids.bounds[:-1].astype(np.int64)
    starts, stops = first[row] + start, first[row] + stop
    placeholders = family.placeholder_ids
    ok[row[~np.isin(code, [_bit(modality) for modality in placeholders])]] = False
    kinds = {
        i: [_bit(m) for m, own in placeholders.items() if own == i] for i in placeholders.values()
    }
    for found, bits in zip(_found(ids.flat, [*kinds]), kinds.values(), strict=True):
        mine = np.isin(code, bits)
        ok &= _only_within(found, ids.bounds, starts[mine], stops[mine])
    return ok


def _wrong_frames(
    frame: np.ndarray,
    medium: np.ndarray,
    tokens: np.ndarray,
    pieces: np.ndarray,
    needed: np.ndarray,
) -> np.ndarray:
    """Media whose spans are not one per piece, in order, of all its tokens (any number of times)."""
    if not len(medium):
        return medium
    order = np.argsort(medium, kind="stable")
    frame, medium, tokens = frame[order], medium[order], tokens[order]
    heads = np.flatnonzero(np.diff(medium, prepend=-1))
    counts = np.diff(heads, append=len(medium))
    of = medium[heads]
    place = np.arange(len(medium)) - np.repeat(heads, counts)
    wrong = (counts % pieces[of] != 0) | (
        np.add.reduceat(tokens, heads) != needed[of] * (counts // pieces[of])
    )
    return np.concatenate([of[wrong], medium[frame != place % pieces[medium]]])


def _found(flat: np.ndarray, tokens: list[int]) -> np.ndarray:
    """bool [tokens, ids]: where each token is; ids come from memory once, a block at a time."""
    found = np.empty((len(tokens), len(flat)), bool)
    for start in range(0, len(flat), CACHED_IDS):
        block = slice(start, start + CACHED_IDS)
        for token, out in zip(tokens, found[:, block], strict=True):
            np.equal(flat[block], token, out=out)
    return found


def _only_within(
    found: np.ndarray, bounds: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray:
    """bool [n]: rows [bounds] where `found` holds in the sorted, disjoint [starts, stops), and nowhere else."""
    inner = np.flatnonzero(found[1:] != found[:-1]) + 1
    edges = np.concatenate([found[:1].nonzero()[0], inner, found[-1:].nonzero()[0] + len(found)])
    touching = starts[1:] == stops[:-1]  # two spans, one run
    said = np.empty(2 * len(starts), np.int64)
    said[::2], said[1::2] = starts, stops
    kept = np.ones(len(said), bool)
    kept[1:-1].reshape(-1, 2)[touching] = False
    if np.array_equal(edges, said[kept]):
        return np.ones(len(bounds) - 1, bool)
    wanted = np.zeros(len(found), bool)
    for a, b in zip(starts.tolist(), stops.tolist(), strict=True):
        wanted[a:b] = True
    return same_slices(found, bounds, wanted, bounds)


def _bits(items: Items) -> np.ndarray:
    """uint8 [m]: of the modality."""
    return (1 << items.codes("modality", MODALITIES)).astype(np.uint8)


def _bit(modality: str) -> np.uint8:
    return np.uint8(1 << MODALITIES.index(modality))


PLACEHOLDERS = Topic(
    codes=("MM101", "MM103", "MM104", "MM105", "MM106", "MM110", "MM111", "MM117"),
    fields=("input_ids", "media", "modality_spans"),
    problems=problems,
    valid=valid,
)
