"""The prefix forest against brute force: a row is a distinct path of tokens, and sees its own path alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.batches import batches
from support.samples import make_sample

from mmpack.layout.forest import build_forest, positions_of

IDS = st.integers(0, 2)


@st.composite
def tries(draw):
    """Samples over three ids, many with a common beginning, some with one of two images in it."""
    out = []
    for i in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from([[], *[s for s, _ in out]]))
        cut = draw(st.integers(0, len(base)))
        more = draw(
            st.lists(
                IDS.map(lambda t: ("text", [t]))
                | st.sampled_from("ab").map(lambda name: ("image", (1, 2, 4), name)),
                max_size=5,
            )
        )
        parts = base[:cut] + more
        out.append((parts, make_sample(parts, sample_id=str(i))))
    return [sample for _, sample in out]


def tokens_of(sample):
    """What a token is, by hand: id, position, and the medium that it stands for."""
    medium = dict.fromkeys(range(len(sample)), "")
    for span in sample.modality_spans:
        for t in range(span.start, span.stop):
            medium[t] = sample.media[span.media_index].cache_key
    places = positions_of(sample)
    return [
        (int(sample.input_ids[t]), medium[t], *places[:, t].tolist()) for t in range(len(sample))
    ]


def check_visibility(forest, count):
    """visible_until against the ancestor test, pair by pair, only from the samples' rows."""
    total = forest.num_tokens
    sees = np.zeros((total, total), dtype=bool)
    for b in range(count):
        rows = forest.rows(b)
        for at, q in enumerate(rows):
            sees[q, rows[: at + 1]] = True
    until = forest.visible_until()
    q, k = np.arange(total)[:, None], np.arange(total)[None]
    np.testing.assert_array_equal((k <= q) & (q < until[None]), sees)
    assert until.dtype == np.int32


def check_segments(forest, given_samples):
    offsets, parents = forest.segment_offsets, forest.segment_parent
    assert offsets[0] == 0 and (np.diff(offsets) >= 0).all()
    assert (parents < np.arange(len(parents))).all()
    for b, sample in enumerate(given_samples):
        path = forest.path(b)
        assert path[-1] == forest.sample_segment[b] and parents[path[0]] == -1
        assert [parents[g] for g in path[1:]] == path[:-1]
        assert len(forest.rows(b)) == len(sample)
    for g, (owner, depth) in enumerate(
        zip(forest.segment_sample, forest.segment_depth, strict=True)
    ):
        length = offsets[g + 1] - offsets[g]
        expected = np.arange(offsets[g], offsets[g + 1])
        np.testing.assert_array_equal(forest.rows(owner)[depth : depth + length], expected)


@given(tries())
def test_rows_are_distinct_paths_and_see_their_own_path(batch):
    forest = build_forest(batch)
    row_of = {}
    for b, sample in enumerate(batch):
        tokens = tokens_of(sample)
        for t, row in enumerate(forest.rows(b)):
            assert row_of.setdefault(tuple(tokens[: t + 1]), row) == row
    assert sorted(row_of.values()) == list(range(forest.num_tokens))
    check_visibility(forest, len(batch))
    check_segments(forest, batch)
    rows = np.concatenate([np.unique(forest.rows(b)) for b in range(len(batch))])
    assert forest.shared == (len(rows) != len(set(rows.tolist())))


@given(batches())
def test_without_sharing_samples_lie_in_order(batch):
    forest = build_forest(batch, share=False)
    np.testing.assert_array_equal(
        np.concatenate([forest.rows(b) for b in range(len(batch))]), np.arange(forest.num_tokens)
    )
    assert not forest.shared
    check_visibility(forest, len(batch))
    check_segments(forest, batch)


def test_unlike_positions_are_not_shared():
    a, b = (make_sample([("text", [1, 2, 3, 4])], name) for name in "ab")
    b.position_ids = positions_of(b).copy()
    assert build_forest([a, b]).num_tokens == 4
    b.position_ids[2, 2] += 1
    assert build_forest([a, b]).num_tokens == 6


def test_a_run_is_shared_as_a_whole_or_not_at_all():
    """One video at two speeds: its first frame has the same positions in both."""
    a, b = (make_sample([("text", [1]), ("video", (3, 4, 4), "clip")], name) for name in "ab")
    a.media[0].second_per_grid_ts, b.media[0].second_per_grid_ts = 1.0, 2.0
    start = a.modality_spans[0].start
    assert (positions_of(a)[:, : start + 4] == positions_of(b)[:, : start + 4]).all()
    forest = build_forest([a, b])
    assert set(forest.rows(0)) & set(forest.rows(1)) == set(range(start))
