"""Codec ids that flip with the batch's shape: a small residual quantizer shows it, parity counts and names it."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planting.said import check
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.parity.codec import codec_flips

CAUSES = Path(__file__).resolve().parents[2] / "fixtures/causes"


def test_flips_of_a_quantizer_are_near_ties(monkeypatch):
    """Ids depend on the batch's shape alone, and in float64 the two entries of a first flip are almost equally near."""
    monkeypatch.syspath_prepend(str(CAUSES))
    import residual_quantizer as quantizer

    sys.modules.pop("residual_quantizer")
    samples = quantizer.waveform(40.0)
    one, two, four, eight = (quantizer.encode(samples, size) for size in (1, 2, 4, 8))
    assert np.array_equal(two, one) and np.array_equal(four, eight)
    flips = codec_flips(one, eight)
    assert 5 < flips.frames_flipped < 0.05 * flips.frames
    # Rounding is as large at each level, and what is left to code is smaller: deeper levels flip more.
    half = quantizer.LEVELS // 2
    assert flips.first[half:].sum() > flips.first[:half].sum()
    weights, books = quantizer._parameters()
    frames = samples.reshape(-1, quantizer.FRAME).astype(np.float64) @ weights.astype(np.float64)
    for frame in np.flatnonzero((one != eight).any(axis=0)):
        level = int((one != eight)[:, frame].argmax())
        rest = frames[frame] - sum(books[above][one[above, frame]] for above in range(level))
        distance = np.sqrt(((rest - books[level].astype(np.float64)) ** 2).sum(axis=1))
        both = [distance[ids[level, frame]] for ids in (one, eight)]
        assert abs(both[0] - both[1]) < 2e-4 and max(both) < distance.min() + 2e-4


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_flips_are_those_of_a_loop(levels, frames, seed):
    a, b = np.random.default_rng(seed).integers(0, 3, (2, levels, frames))
    flips = codec_flips(a, b)
    flipped, first, place = [0] * levels, [0] * levels, None
    for frame in range(frames):
        unlike = [level for level in range(levels) if a[level, frame] != b[level, frame]]
        for level in unlike:
            flipped[level] += 1
        for level in unlike[:1]:
            first[level] += 1
            place = place or (level, frame)
    assert (flips.flipped.tolist(), flips.first.tolist(), flips.place) == (flipped, first, place)
    assert flips.frames_flipped == sum(first)
    for level in range(levels):
        left = frames - sum(first[:level])
        assert flips.first_rate[level] == (first[level] / left if left else 0)
        assert flips.rate[level] == (flipped[level] / frames if frames else 0)


@pytest.mark.parametrize("bad", [[1, 2], [[1.0]], [[1], [2, 3]], "x", None])
def test_what_are_no_ids_is_one_line(bad):
    with pytest.raises(ArgumentError, match=r"^codec_flips: right is [^\n]+Fix: "):
        codec_flips([[1]], bad)
    with pytest.raises(ArgumentError, match="a different length is not a flip"):
        codec_flips([[1]], [[1, 2]])


# ---- findings ------------------------------------------------------------------------------------

CODES = np.arange(60, dtype=np.int32).reshape(3, 20) % 16
LONG = np.random.default_rng(3).integers(0, 16, (4, 200)).astype(np.int32)
STEADY = np.repeat(LONG[:, :40], 5, axis=1)  # ids that stay, as of vowels and of silence


def sample(codes=CODES, content="sha256:aa", codec="c1", batch=None, rate=12.5):
    made = make_sample([("text", [1, 2]), ("response", [3, 4])])
    piece = mp.schema.CodecIds(codec, np.array(codes, np.int32), (16,) * len(codes), rate, content)
    piece.metadata = {} if batch is None else {"batch_shape": batch}
    made.codec_ids = [piece]
    return made


def changed(level=slice(None), frame=slice(None), by=1, codes=LONG):
    out = codes.copy()
    out[level, frame] = (out[level, frame] + by) % 16
    return out


FLIPPED = changed(slice(1, None), slice(0, 1), codes=CODES)


def test_a_flip_is_named_counted_and_placed():
    said = "1 of 20 frames differ, by level 0.00%, 5.00%, 5.00%", "batches [8, 9] and [1, 9]"
    sides = sample(batch=[8, 9]), sample(FLIPPED, batch=[1, 9])
    (finding,) = check(*sides, "codec_flip", *said).findings
    assert finding.left == "id 4 at level 1, frame 0" and finding.right.startswith("id 5 at")
    assert "codec_ids.metadata" in check(sides[0], sample(batch=[1, 9])).not_compared


def delayed(codes):
    return np.stack([np.roll(ids, level) for level, ids in enumerate(codes)])


@pytest.mark.parametrize(
    ("left", "right", "evidence"),
    [
        (sample(), sample(FLIPPED, content="sha256:bb"), "handed other samples"),
        (sample(), sample(FLIPPED, codec="c2"), "codec differs"),
        (sample(), sample(rate=25.0), "frame_rate differs"),
        (sample(), sample(CODES[:, :-1]), "another number of levels or frames"),
        (sample(), sample(changed(frame=slice(15), codes=CODES)), "too many for near ties"),
        (sample(content=None), sample(FLIPPED, content=None), "possible: codec_flip"),
        (sample(), sample(FLIPPED, content=None), "possible: codec_flip"),
        (sample(LONG), sample(changed(level=3)), "near ties at level 3"),  # another codebook there
        (sample(LONG), sample(LONG[[0, 2, 1, 3]]), "near ties at level 1"),
        (sample(LONG), sample(changed(frame=slice(150, None))), "one stretch, frames 150 to 199"),
        (sample(STEADY), sample(np.roll(STEADY, 1, axis=1)), "level 0 is 1 frame later"),
        (sample(STEADY), sample(np.roll(STEADY, -2, axis=1)), "level 0 is 2 frames earlier"),
        (sample(STEADY), sample(delayed(STEADY)), "level 1 is 1 frame later"),
    ],
)
def test_what_near_ties_do_not_make_is_unknown(left, right, evidence):
    check(left, right, "unknown", evidence)


def test_near_ties_are_flips():
    steady = np.repeat(LONG[:, :10], 20, axis=1)
    neighbours = changed(frame=[3, 4, 5, 90], level=slice(1, None))
    for left, right in (
        (LONG, neighbours),  # neighbours may flip, and
        (steady, changed(frame=slice(40, 60), codes=steady)),  # equal frames do
        (LONG, changed(frame=-1)),
    ):
        check(sample(left), sample(right), "codec_flip")
    rng = np.random.default_rng(4)
    for share in (0.01, 0.1, 0.3, 0.45):
        for codes in (LONG, STEADY):
            frames = np.flatnonzero(rng.random(200) < share)
            check(sample(codes), sample(changed(frame=frames, codes=codes)), "codec_flip")


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (2, 0)])
def test_ids_without_levels_or_frames_are_a_broken_rule_and_no_error(shape):
    sides = [sample(np.zeros(shape, np.int32)) for _ in range(2)]
    for side in sides:
        side.codec_ids[0].codes = np.zeros(shape, np.int32)
    check(*sides, "unknown", "MM322")
    assert codec_flips(*[side.codec_ids[0].codes for side in sides]).place is None
