"""Codec ids that flip with the batch's shape: a small residual quantizer shows it, parity counts and names it."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.parity.codec import codec_flips

CAUSES = Path(__file__).resolve().parents[2] / "fixtures/causes"


@pytest.fixture(scope="module")
def quantizer():
    sys.path.insert(0, str(CAUSES))
    try:
        import residual_quantizer
    finally:
        sys.path.remove(str(CAUSES))
    return residual_quantizer


@pytest.fixture(scope="module")
def encodings(quantizer):
    samples = quantizer.waveform(40.0)
    return {size: quantizer.encode(samples, size) for size in (1, 2, 4, 8)}


def test_ids_depend_on_the_shape_of_the_batch_and_on_nothing_else(quantizer, encodings):
    again = quantizer.encode(quantizer.waveform(40.0), 1)
    assert np.array_equal(again, encodings[1]) and np.array_equal(encodings[2], encodings[1])
    assert np.array_equal(encodings[4], encodings[8])
    flips = codec_flips(encodings[1], encodings[8])
    assert 0 < flips.frames_flipped < 0.05 * flips.frames
    # Rounding is as large at each level, and what is left to code is smaller: deeper levels flip more.
    half = quantizer.LEVELS // 2
    assert flips.first[half:].sum() > flips.first[:half].sum()


def test_each_flip_is_a_near_tie(quantizer, encodings):
    """In float64 the two entries of a first flip are almost equally near: the codec is not broken, it is undecided."""
    weights, books = quantizer._parameters()
    frames = quantizer.waveform(40.0).reshape(-1, quantizer.FRAME).astype(np.float64)
    unlike = encodings[1] != encodings[8]
    level = unlike.argmax(axis=0)
    checked = 0
    for frame in np.flatnonzero(unlike.any(axis=0)):
        residual = frames[frame] @ weights.astype(np.float64)
        for above in range(level[frame]):
            residual = residual - books[above][encodings[1][above, frame]]
        book = books[level[frame]].astype(np.float64)
        distance = ((residual - book) ** 2).sum(axis=1)
        one, two = (distance[ids[level[frame], frame]] for ids in (encodings[1], encodings[8]))
        nearest = np.sqrt(np.sort(distance))
        assert abs(np.sqrt(one) - np.sqrt(two)) < 2e-4
        assert max(np.sqrt(one), np.sqrt(two)) < nearest[0] + 2e-4
        checked += 1
    assert checked > 5


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_flips_are_those_of_a_loop(levels, frames, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 3, (2, levels, frames))
    flips = codec_flips(a, b)
    flipped, first, place = [0] * levels, [0] * levels, None
    for frame in range(frames):
        seen = False
        for level in range(levels):
            if a[level, frame] != b[level, frame]:
                flipped[level] += 1
                if not seen:
                    first[level] += 1
                    place = place or (level, frame)
                seen = True
    assert (flips.flipped.tolist(), flips.first.tolist(), flips.place) == (flipped, first, place)
    assert flips.frames_flipped == sum(first)
    for level in range(levels):
        left = frames - sum(first[:level])
        assert flips.first_rate[level] == (first[level] / left if left else 0)
        assert flips.rate[level] == (flipped[level] / frames if frames else 0)


@pytest.mark.parametrize("bad", [[1, 2], [[1.0]], [[1], [2, 3]], "x", None, [[[1]]]])
def test_what_are_no_ids_is_one_line(bad):
    with pytest.raises(ArgumentError, match=r"^codec_flips: right is [^\n]+Fix: "):
        codec_flips([[1]], bad)
    with pytest.raises(ArgumentError, match="a different length is not a flip"):
        codec_flips([[1]], [[1, 2]])


# ---- findings ------------------------------------------------------------------------------------

CODES = np.arange(60, dtype=np.int32).reshape(3, 20) % 16


def sample(codes=CODES, content="sha256:aa", codec="c1", batch=None, rate=12.5):
    made = make_sample([("text", [1, 2]), ("response", [3, 4])])
    piece = mp.CodecIds(codec, np.array(codes, np.int32), (16,) * len(codes), rate, content)
    piece.metadata = {} if batch is None else {"batch_shape": batch}
    made.codec_ids = [piece]
    return made


def flipped(count=1, level=1):
    codes = CODES.copy()
    codes[level:, :count] = (codes[level:, :count] + 1) % 16
    return codes


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", None])
def test_a_flip_is_named_counted_and_placed(tmp_path, suffix):
    sides = [sample(batch=[8, 9]), sample(flipped(), batch=[1, 9])]
    if suffix:
        for name, side in zip("ab", sides, strict=True):
            mp.write_trace(tmp_path / f"{name}{suffix}", [side])
        report = mp.compare(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}")
    else:
        report = mp.compare(sides[:1], sides[1:])
    (finding,) = report.findings
    assert (finding.field, finding.cause) == ("codec_ids", "codec_flip")
    assert finding.left == "id 4 at level 1, frame 0" and finding.right.startswith("id 5 at")
    assert "1 of 20 frames differ, by level 0.00%, 5.00%, 5.00%" in finding.evidence
    assert "batches [8, 9] and [1, 9]" in finding.evidence


def test_equal_ids_are_no_finding_whatever_the_batch():
    report = mp.compare([sample(batch=[8, 9])], [sample(batch=[1, 9])])
    assert report.ok and report.findings == []
    assert "codec_ids.metadata" in report.not_compared


@pytest.mark.parametrize(
    ("left", "right", "evidence"),
    [
        (sample(), sample(flipped(), content="sha256:bb"), "handed other samples"),
        (sample(), sample(flipped(), codec="c2"), "codec differs"),
        (sample(), sample(rate=25.0), "frame_rate differs"),
        (sample(), sample(CODES[:, :-1]), "another number of levels or frames"),
        (sample(), sample(flipped(15, level=0)), "too many for near ties"),
        (sample(content=None), sample(flipped(), content=None), "possible: codec_flip"),
        (sample(), sample(flipped(), content=None), "possible: codec_flip"),
    ],
)
def test_without_its_evidence_it_is_unknown(left, right, evidence):
    for sides in ((left, right), (right, left)):
        report = mp.compare(sides[:1], sides[1:])
        assert list(report.causes) == ["unknown"] and not report.ok
        assert any(evidence in finding.evidence for finding in report.findings)


def test_what_only_one_side_recorded_is_listed():
    bare = make_sample([("text", [1, 2]), ("response", [3, 4])])
    report = mp.compare([sample()], [bare])
    assert report.ok and "train has no codec_ids" in report.not_compared["codec_ids"]
    assert not mp.compare([sample()], [bare], require=("codec_ids",)).ok
    two = sample()
    two.codec_ids = two.codec_ids * 2
    assert not mp.compare([sample()], [two]).ok


# ---- what is no flip -----------------------------------------------------------------------------

LONG = np.random.default_rng(3).integers(0, 16, (4, 200)).astype(np.int32)
STEADY = np.repeat(LONG[:, :40], 5, axis=1)  # ids that stay, as of vowels and of silence


def changed(level=slice(None), frame=slice(None), by=1, codes=LONG):
    out = codes.copy()
    out[level, frame] = (out[level, frame] + by) % 16
    return out


def delayed(codes):
    return np.stack([np.roll(ids, level) for level, ids in enumerate(codes)])


@pytest.mark.parametrize(
    ("left", "right", "evidence"),
    [
        (LONG, changed(level=3), "near ties at level 3"),  # another codebook there
        (LONG, LONG[[0, 2, 1, 3]], "near ties at level 1"),
        (LONG, changed(frame=slice(150, None)), "one stretch, frames 150 to 199"),
        (LONG, changed(frame=slice(20)), "one stretch, frames 0 to 19"),
        (STEADY, np.roll(STEADY, 1, axis=1), "level 0 is 1 frame later"),
        (STEADY, np.roll(STEADY, -2, axis=1), "level 0 is 2 frames earlier"),
        (STEADY, delayed(STEADY), "level 1 is 1 frame later"),
    ],
)
def test_what_near_ties_do_not_make_is_unknown(left, right, evidence):
    report = mp.compare([sample(left)], [sample(right)])
    assert list(report.causes) == ["unknown"]
    assert any(evidence in finding.evidence for finding in report.findings)


@pytest.mark.parametrize(
    "right",
    [
        changed(frame=[3, 4, 5, 90], level=slice(1, None)),  # neighbours may flip, and
        changed(frame=slice(40, 60), codes=np.repeat(LONG[:, :10], 20, axis=1)),  # equal frames do
        changed(frame=np.arange(0, 200, 3)),
        changed(frame=-1),
    ],
)
def test_near_ties_of_neighbours_are_flips(right):
    left = np.repeat(LONG[:, :10], 20, axis=1) if (right[:, :20] == right[:, :1]).all() else LONG
    assert list(mp.compare([sample(left)], [sample(right)]).causes) == ["codec_flip"]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (2, 0)])
def test_ids_without_levels_or_frames_are_a_broken_rule_and_no_error(shape):
    sides = [sample(np.zeros(shape, np.int32)) for _ in range(2)]
    for side in sides:
        side.codec_ids[0].codes = np.zeros(shape, np.int32)
    report = mp.compare(sides[:1], sides[1:])
    assert any("MM322" in finding.evidence for finding in report.findings)
    assert codec_flips(*[side.codec_ids[0].codes for side in sides]).place is None


def test_random_near_ties_are_flips():
    rng = np.random.default_rng(4)
    for share in (0.01, 0.1, 0.3, 0.45):
        for codes in (LONG, STEADY):
            frames = np.flatnonzero(rng.random(200) < share)
            report = mp.compare([sample(codes)], [sample(changed(frame=frames, codes=codes))])
            assert list(report.causes) == ["codec_flip"], share
