"""Temporal patches dropped and blackened: the sample equals one that was built of the shorter clip from the start."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.fingerprint import cache_key, content_hash
from mmpack.schema.spans import ActionSpan, ObservationSpan, PolicyVersion, RegionSpan, Score
from mmpack.video.drop import drop_frames, mask_frames

START, VIDEO, END = 151652, 151656, 151653
VIDEO_SETTINGS = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
VIDEO_SETTINGS |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}


def video_of(patches, frames=None, name="f"):
    """A medium of 4 × 4 patches per temporal patch, at 8 frames per second of which every fourth was taken."""
    medium = make_medium(name, (patches, 4, 4), "video")
    count = 2 * patches if frames is None else frames
    medium.fps, medium.total_frames = 8.0, 200
    medium.frame_indices = np.arange(count) * 4
    medium.frame_timestamps = tuple((medium.frame_indices / 8).tolist())
    return medium


def watched(family, medium, twice=False, before=(5, 6), markers="kept", stamps=None):
    """Text, a video (its timestamps `stamps`), a response, at times the video again, more text and a response."""
    ids, spans, loss = list(before), [], []

    def show():
        about = get_family(family)
        t, *_ = medium.grid_thw
        if about.video_layout != "frames":
            ids.append(START)
            spans.append(mp.schema.ModalitySpan(len(ids), len(ids) + 4 * t, "video", 0))
            ids.extend([VIDEO] * 4 * t + [END])
            return
        ids.extend([START] * (markers == "kept"))
        for k in range(t):
            ids.extend([*stamps[k], START])
            spans.append(mp.schema.ModalitySpan(len(ids), len(ids) + 4, "video", 0, k))
            ids.extend([VIDEO] * 4 + [END])
        ids.extend([END] * (markers == "kept"))

    def answer(turn):
        loss.append(mp.LossSpan(len(ids), len(ids) + 3, turn=turn))
        ids.extend([31, 32, 33])

    show()
    ids += [7, 8]
    answer(0)
    if twice:
        show()
        ids += [9]
        answer(1)
    return mp.Sample("s", "g", family, np.array(ids), [medium], spans, loss)


def stamp(seconds):
    """An id a character, as Qwen's tokenizer has one a digit."""
    return [27, *(15 + ord(c) for c in f"{seconds:.1f}"), 6486, 29]


def seconds_of(medium):
    at = medium.frame_indices / medium.fps
    at = np.append(at, [at[-1]] * (len(at) % 2))
    return at.reshape(-1, 2).mean(axis=1)


def shortened(medium, kept):
    """The video as a loader gives it that took only these frames."""
    frames = [f for k in kept for f in (2 * k, 2 * k + 1) if f < len(medium.frame_indices)]
    out = video_of(len(kept))
    out.frame_indices = medium.frame_indices[frames]
    out.frame_timestamps = tuple(medium.frame_timestamps[f] for f in frames)
    return out


@settings(max_examples=40)
@given(
    st.sampled_from(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["kept", "replaced"]),
    st.data(),
)
def test_a_sample_of_the_shorter_clip(family, patches, odd, twice, markers, data):
    gone = data.draw(st.sets(st.integers(0, patches - 1), min_size=1, max_size=patches - 1))
    kept = [k for k in range(patches) if k not in gone]
    whole = video_of(patches, 2 * patches - odd)
    whole.frame_indices += 70  # from 8.75 s on: timestamps of two lengths
    whole.frame_timestamps = tuple((whole.frame_indices / 8).tolist())
    short = shortened(whole, kept)
    layout = {"twice": twice, "markers": markers}
    sample = watched(family, whole, stamps=[stamp(s) for s in seconds_of(whole)], **layout)
    wanted = watched(family, short, stamps=[stamp(s) for s in seconds_of(short)], **layout)
    if family == "qwen2_5_vl":
        whole.second_per_grid_ts = 2 / (len(whole.frame_indices) / 200 * 8.0)
        short.second_per_grid_ts = 2 / (len(short.frame_indices) / 200 * 8.0)
    for s in (sample, wanted):
        s.position_ids = positions(s)
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((patches, 16, get_family(family).patch_dim), dtype=np.float32)
    whole.pixel_values = pixels.reshape(patches * 16, -1)
    before = sample.input_ids.copy(), whole.cache_key
    out = drop_frames(sample, 0, list(gone))
    assert mp.validate([sample, out]) == []
    assert out.media[0].cache_key != before[1] and out.media[0].content_hash is None
    assert np.array_equal(out.media[0].pixel_values, pixels[kept].reshape(len(kept) * 16, -1))
    consecutive = kept[-1] - kept[0] + 1 == len(kept)
    assert np.shares_memory(out.media[0].pixel_values, pixels) == consecutive
    short.cache_key, short.content_hash = out.media[0].cache_key, None
    assert out.media[0].pixel_values is not None
    assert out == wanted
    assert np.array_equal(sample.input_ids, before[0]) and sample.media[0].cache_key == before[1]
    assert mp.pack([out], share_prefix=True).stats["patches"] == 16 * len(kept)


def positions(sample):
    from mmpack.layout.mrope import sample_positions

    return sample_positions(sample)[0]


def test_a_word_that_runs_into_the_timestamp():
    """In a text encoded whole, the first timestamp's `<` may be one token with what stands before it."""
    merged = 17000
    whole = video_of(3)
    stamps = [stamp(s) for s in seconds_of(whole)]
    stamps[0] = [merged, *stamps[0][1:]]
    sample = watched("qwen3_vl", whole, stamps=stamps, markers="replaced")
    out = drop_frames(sample, 0, [0, 1])
    short = shortened(whole, [2])
    last = [merged, *stamp(seconds_of(short)[0])[1:]]
    wanted = watched("qwen3_vl", short, stamps=[last], markers="replaced")
    assert out.input_ids.tolist() == wanted.input_ids.tolist()
    assert out.modality_spans == wanted.modality_spans


def test_everything_that_counts_tokens_moves():
    other, last = ("image", (1, 4, 4), "x"), ("text", [1, 2, 3])
    parts = [("text", [1]), other, ("video", (3, 4, 4), "f"), *[last], ("response", [4, 5], 0)]
    sample = make_sample([*parts, ("observation", [6, 7], 1), ("response", [8], 1)])
    n = len(sample)
    film_start = sample.modality_spans[1].start
    gone = 2 * 4
    sample.attention_mask = np.ones(n, np.int8)
    sample.rollout_logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    sample.action_spans = [ActionSpan(n - 1, n, {"a": 1})]
    sample.region_spans = [RegionSpan(2, 4, 0), RegionSpan(n - 3, n - 1, 1)]
    sample.observation_spans.insert(0, ObservationSpan(film_start - 1, film_start + 13, "tool"))
    sample.policy_versions = [
        PolicyVersion(0, film_start + 6, "a"),
        PolicyVersion(film_start + 6, n, "b"),
    ]
    sample.rewards = [
        Score("r", 1.0),
        Score("s", 1.0, {"span": [n - 1, n]}),
        Score("t", 1.0, {"turn": 0}),
    ]
    sample.prefix_cached_tokens = film_start + 6
    out = drop_frames(sample, 1, [0, 2])
    assert mp.validate(out) == [] and len(out) == n - gone == len(out.attention_mask)
    assert out.input_ids[out.loss_indices].tolist() == [4, 5, 8]
    assert out.rollout_logprobs is sample.rollout_logprobs
    assert out.action_spans == [ActionSpan(n - gone - 1, n - gone, {"a": 1})]
    assert out.region_spans == [RegionSpan(2, 4, 0), RegionSpan(n - gone - 3, n - gone - 1, 1)]
    seen = out.observation_spans[0]
    assert (seen.start, seen.stop) == (film_start - 1, film_start + 5)
    versions = [(v.start, v.stop) for v in out.policy_versions]
    assert versions == [(0, film_start + 2), (film_start + 2, n - gone)]
    assert out.rewards[1].scope == {"span": [n - gone - 1, n - gone]}
    assert out.prefix_cached_tokens == film_start + 2
    assert out.position_ids is None
    assert out.media[0] is sample.media[0] and out.modality_spans[0] == sample.modality_spans[0]
    whole, short = mp.pack([sample]), mp.pack([out])
    assert short.loss_targets.tolist() == whole.loss_targets.tolist()
    assert short.loss_rows.tolist() == [r - gone for r in whole.loss_rows.tolist()]


def test_keys_follow_the_frames():
    whole = video_of(3)
    sample = watched("qwen2_5_vl", whole)
    sample.processor = {"video": VIDEO_SETTINGS}
    keys = {whole.cache_key}
    for gone in ([0], [1], [2], [0, 1]):
        keys.add(drop_frames(sample, 0, gone).media[0].cache_key)
        keys.add(mask_frames(sample, 0, gone).media[0].cache_key)
    assert len(keys) == 9 and all(len(k) == 64 for k in keys)
    same = drop_frames(sample, 0, [1]), drop_frames(sample, 0, [1])
    assert same[0] == same[1]
    frames = np.random.default_rng(0).integers(0, 256, (6, 56, 56, 3), dtype=np.uint8)
    (medium,) = drop_frames(sample, 0, [1], frames=frames).media
    left = frames[[0, 1, 4, 5]]
    assert medium.content_hash == content_hash("video", left)
    assert medium.cache_key == cache_key(medium.content_hash, (2, 4, 4), VIDEO_SETTINGS)
    (medium,) = mask_frames(sample, 0, [1], frames=frames).media
    black = frames.copy()
    black[2:4] = 0
    assert medium.content_hash == content_hash("video", black) and frames[2:4].any()
    assert drop_frames(sample, 0, []).media[0] == whole


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_black_frames(kind):
    whole = video_of(3)
    sample = watched("qwen2_5_vl", whole)
    sample.processor = {"video": VIDEO_SETTINGS}
    pixels = np.random.default_rng(0).standard_normal((48, 1176), dtype=np.float32)
    whole.pixel_values = torch.from_numpy(pixels.copy()) if kind == "torch" else pixels.copy()
    out = mask_frames(sample, 0, [1])
    assert mp.validate(out) == []
    made = np.asarray(out.media[0].pixel_values)
    assert np.array_equal(np.asarray(whole.pixel_values), pixels)
    assert np.array_equal(made[:16], pixels[:16]) and np.array_equal(made[32:], pixels[32:])
    mean, std = (torch.tensor(VIDEO_SETTINGS[f"image_{n}"]) * 255.0 for n in ("mean", "std"))
    wanted = ((torch.zeros(3) - mean) / std)[:, None].expand(3, 392).reshape(-1).numpy()
    assert np.array_equal(made[16:32], np.broadcast_to(wanted, (16, 1176)))
    for name in ("input_ids", "modality_spans", "loss_spans"):
        assert getattr(out, name) is getattr(sample, name)
    sample.processor = None
    with pytest.raises(mp.ArgumentError, match="do_rescale or do_normalize"):
        mask_frames(sample, 0, [1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_seconds_that_an_engine_cast(dtype):
    """What it would make of the 10 frames of 14 that are left."""
    whole = video_of(7)
    recorded, wanted = (torch.tensor(2 / (n / 200 * 8)).to(dtype).item() for n in (14, 10))
    whole.second_per_grid_ts = recorded
    found = drop_frames(watched("qwen2_5_vl", whole), 0, [1, 3]).media[0].second_per_grid_ts
    assert found == wanted != recorded * 14 / 10
    whole.second_per_grid_ts = 3.0  # not what fps and frames give: a policy's own
    sample = watched("qwen2_5_vl", whole)
    assert drop_frames(sample, 0, [1, 3]).media[0].second_per_grid_ts == pytest.approx(4.2)
    out = drop_frames(sample, 0, [3], second_per_grid_ts=3.0)
    assert out.media[0].second_per_grid_ts == 3.0


@pytest.mark.parametrize("rule", ["max", "grid_int"])
def test_positions_keep_their_rule(rule):
    from mmpack.layout.mrope import sample_positions

    whole = video_of(6)
    whole.second_per_grid_ts = 2 / (12 / 200 * 8)
    sample = watched("qwen2_5_vl", whole)
    sample.position_ids = sample_positions(sample, rule)[0]
    out = drop_frames(sample, 0, [1, 2])
    assert np.array_equal(out.position_ids, sample_positions(out, rule)[0])


def test_what_is_refused():
    whole = video_of(3)
    sample = watched("qwen2_5_vl", whole)
    picture = make_sample([("text", [1]), ("image", (1, 4, 4))])
    for function in (drop_frames, mask_frames):
        with pytest.raises(mp.ArgumentError, match=r"media\[1\] of 1"):
            function(sample, 1, [0])
        with pytest.raises(mp.ArgumentError, match="is of modality image"):
            function(picture, 0, [0])
        with pytest.raises(mp.ArgumentError, match=r"media_index is .*expected int"):
            function(sample, True, [0])
        for numbers in ([False], [0.0], None, "0"):
            with pytest.raises(mp.ArgumentError, match=r"temporal_patches is .*Fix: pass numbers"):
                function(sample, 0, numbers)
        for numbers in ([3], [-1]):
            with pytest.raises(mp.ArgumentError, match="'f' has 0 to 2"):
                function(sample, 0, numbers)
        with pytest.raises(mp.ArgumentError, match="not those of 'f'"):
            function(sample, 0, [0], frames=np.zeros((9, 8, 8, 3), np.uint8))
    with pytest.raises(mp.ArgumentError, match="nothing of 'f' would be left"):
        drop_frames(sample, 0, [0, 1, 2])
    sample.position_ids = np.zeros((3, len(sample)), np.int64)
    with pytest.raises(mp.ArgumentError, match="follow none of grid, max, grid_int"):
        drop_frames(sample, 0, [0])
    sample.position_ids = None
    sample.loss_spans[0].start = 3
    with pytest.raises(mp.ArgumentError, match=r"loss_spans\[0\] \[3, "):
        drop_frames(sample, 0, [0])
    bare = watched("qwen3_vl", video_of(2), stamps=[[1], [2]])
    bare.input_ids[bare.modality_spans[1].stop] = 9
    with pytest.raises(mp.ArgumentError, match="without markers around them"):
        drop_frames(bare, 0, [0])
