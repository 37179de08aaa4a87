"""MM101 to MM117: media (grids, token counts, cache keys, times), their spans and placeholders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpack.families import Family
from mmpack.schema.codes import Found
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import is_placeholder


def medium_problems(sample: Sample, family: Family) -> Found:
    """MM102, MM107 to MM109, MM111 to MM116."""
    seen: dict[str, tuple[int, str | None, tuple[int, int, int]]] = {}
    used = {s.media_index for s in sample.modality_spans}
    for i, medium in enumerate(sample.media):
        field = f"media[{i}]"
        t, h, w = medium.grid_thw
        hears = medium.modality == "audio"
        merge = 1 if hears else family.spatial_merge_size
        if min(t, h, w) == 0 or h % merge or w % merge or (hears and (h, w) != (1, 1)):
            what = "an audio's is [frames, 1, 1]" if hears else f"merge size is {merge}"
            yield "MM102", field, f"has grid {[t, h, w]}, {what}", None
        elif medium.num_tokens != (expected := family.tokens_in(medium)):
            message = f"says num_tokens {medium.num_tokens}, its grid {[t, h, w]} gives {expected}"
            yield "MM108", field, message, None
        if i not in used:
            yield "MM107", field, f"({medium.media_id!r:.60}) has no span", None
        content = (i, medium.content_hash, medium.grid_thw)
        first = seen.setdefault(medium.cache_key, content)
        if first[2] != content[2] or (
            None not in (first[1], content[1]) and first[1] != content[1]
        ):
            yield "MM109", field, f"has the cache key of media[{first[0]}] but other content", None
        for name in ("fps", "second_per_grid_ts"):
            value = getattr(medium, name)
            if value is not None and not 0 <= value < np.inf:
                yield "MM112", field, f"has {name} {value:g}", None
        if medium.modality == "video":
            for code, message in _frames(medium, family):
                yield code, field, message, None
        if hears:
            for message in _of_audio(medium):
                yield "MM116", field, message, None


def _of_audio(medium: Medium) -> Iterator[str]:
    """Check an audio's figures; extractors differ in whether they keep a last partial frame."""
    rate, count, hop = medium.sampling_rate, medium.num_samples, medium.hop_length
    for name, value in (("sampling_rate", rate), ("hop_length", hop)):
        if value == 0:
            yield f"has {name} 0"
    frames = medium.grid_thw[0]
    if count is not None and hop and not count // hop <= frames <= -(-count // hop):
        yield f"has {count} samples, one in {hop} makes {count // hop} frames, its grid has {frames}"


def _frames(medium: Medium, family: Family) -> Iterator[tuple[str, str]]:
    """Check a video's frames and times; its last temporal patch may be padded, a frame may come twice."""
    t, h, w = medium.grid_thw
    indices, times = medium.frame_indices, medium.frame_timestamps
    counts = [len(listed) for listed in (indices, times) if listed is not None]
    patch = family.temporal_patch_size
    if len(counts) == 2 and counts[0] != counts[1]:
        yield "MM113", f"has {counts[0]} frame_indices and {counts[1]} frame_timestamps"
    if counts and -(-counts[0] // patch) != t:
        yield (
            "MM111",
            f"has {counts[0]} frames, its grid {[t, h, w]} holds {t} patches of {patch}",
        )
    for name, listed in (("frame_indices", indices), ("frame_timestamps", times)):
        values = np.asarray(() if listed is None else listed)
        back = np.flatnonzero(values[1:] < values[:-1])
        if len(back):
            at = int(back[0]) + 1
            yield "MM114", f"has {name}[{at}] {values[at]} after {values[at - 1]}"
    odd = [s for s in times or () if not 0 <= s < np.inf]
    if odd:
        yield "MM112", f"has frame_timestamps {odd[0]:g}"
    last = -1 if indices is None or not len(indices) else int(np.max(indices))
    if medium.total_frames is not None and last >= medium.total_frames:
        yield "MM115", f"has frame {last}, total_frames is {medium.total_frames}"


def placeholder_problems(sample: Sample, family: Family) -> Found:
    """MM101, MM103 to MM106, MM110, MM111, MM117."""
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
    """Say what is wrong with the pieces (number, tokens) of a video with sound, or of the sound; 0 begins anew."""
    needed = family.tokens_in(medium)
    numbers = [number for number, _ in chunks]
    begins = [k for k, number in enumerate(numbers) if number == 0]
    if family.audio is None or medium.modality == "image" or not begins or begins[0] != 0:
        return f"has pieces {numbers[:8]}, which begin at no 0"
    for a, b in zip(begins, [*begins[1:], len(chunks)], strict=True):
        tokens = sum(n for _, n in chunks[a:b])
        if numbers[a:b] != list(range(b - a)) or tokens != needed:
            return f"has pieces {numbers[a:b][:8]} of {tokens} tokens, its grid {list(medium.grid_thw)} needs {needed}"
    return ""
