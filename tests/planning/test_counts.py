"""Counts against counting: every row of a forest with the rows that it sees, every patch with those of its window."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.planning.counts import (
    Counts,
    Spans,
    counts_of_batch,
    counts_of_forest,
    plain_counts,
    with_media,
)

lengths = st.lists(st.integers(1, 9), max_size=7)
spans = st.builds(Spans, st.none() | st.integers(1, 12), st.none() | st.integers(1, 5))


@st.composite
def forests(draw):
    """Lengths and parents of segments, parents first."""
    sizes = draw(lengths)
    return sizes, [draw(st.integers(-1, g - 1)) for g in range(len(sizes))]


def paths_of(sizes, parents):
    """Of each segment the rows of its path: (segment, place)."""
    paths = []
    for g, (size, parent) in enumerate(zip(sizes, parents, strict=True)):
        above = [] if parent < 0 else paths[parent]
        paths.append([*above, *((g, i) for i in range(size))])
    return paths


def counted(sizes, parents, window):
    """By going through rows: each sees its path up to itself, through a window its last rows only."""
    paths = paths_of(sizes, parents)
    pairs = near = 0
    for g, path in enumerate(paths):
        for at, (segment, _) in enumerate(path):
            if segment == g:
                seen = path[: at + 1]
                pairs += len(seen)
                near += len(seen[-window:]) if window else 0
    rows = sum(sizes)
    keys = sum(len(path) for g, path in enumerate(paths) if g not in parents)
    waves = max((len({segment for segment, _ in path}) for path in paths), default=1)
    return Counts(rows, pairs, near, keys if keys > rows else 0, waves - 1)


@settings(max_examples=100, deadline=None)
@given(forests(), spans)
def test_rows_see_their_paths(forest, spans):
    sizes, parents = forest
    offsets, above = (
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.array(parents, np.int64),
    )
    depths = np.array(
        [len(p) - n for p, n in zip(paths_of(sizes, parents), sizes, strict=True)], np.int64
    )
    wanted = counted(sizes, parents, spans.window)
    layout = SimpleNamespace(segment_depth=depths, segment_offsets=offsets, segment_parent=above)
    assert counts_of_forest(layout, spans) == wanted
    batch = SimpleNamespace(
        segment_offsets=torch.from_numpy(offsets),
        segment_parent=torch.from_numpy(above),
        media=[],
        cu_loss=torch.tensor([0, 5]),
    )
    assert counts_of_batch(batch, spans) == wanted._replace(loss_tokens=5)
    assert wanted.squares == sum(
        len(p) ** 2 - (len(p) - n) ** 2
        for p, n in zip(paths_of(sizes, parents), sizes, strict=True)
    )


@given(lengths, spans)
def test_plain_samples_are_a_forest_without_branches(sizes, spans):
    assert plain_counts(sizes, spans) == counted(sizes, [-1] * len(sizes), spans.window)


grids = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))


@given(st.lists(st.tuples(st.sampled_from(["image", "video", "audio"]), grids), max_size=3), spans)
def test_patches_see_their_frame_and_their_window(media, spans):
    patches = frames = tiles = heard = 0
    for modality, (t, h, w) in media:
        if modality == "audio":
            heard += t
            continue
        places = [(y, x) for y in range(h) for x in range(w)]
        patches += t * len(places)
        for a in places:
            for b in places:
                frames += t
                same = spans.tile and all(
                    m // spans.tile == n // spans.tile for m, n in zip(a, b, strict=True)
                )
                tiles += t if same else 0
    found = with_media(Counts(rows=3), media, spans)
    assert found == Counts(
        3, patches=patches, frame_pairs=frames, tile_pairs=tiles, audio_frames=heard
    )
