"""Frames that differ: the first one is named as numpy finds it in both plans, by lines, JSON and columns."""

import copy
import json
import math
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.planting.clip import FPS, FRAMES, watched, write_clip

import mmpack as mp
from mmpack.parity.frame_difference import clock

POLICIES = ("qwen_vl_utils", "transformers_qwen2_vl")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("video") / "video.mp4")


def by_numpy(a, b):
    """Place, number of differing places."""
    shorter = min(len(a), len(b))
    unlike = np.asarray(a[:shorter]) != np.asarray(b[:shorter])
    place = int(np.argmax(unlike)) if unlike.any() else shorter
    return place, int(unlike.sum()) + abs(len(a) - len(b))


def seconds_of(shown):
    minutes, rest = shown.lstrip("-").split(":")
    return (60 * int(minutes) + float(rest)) * (-1 if shown[0] == "-" else 1)


@pytest.mark.parametrize(
    "sides",
    [
        [{"policy": "qwen_vl_utils"}, {"policy": "transformers_qwen2_vl"}],
        [{"fps": 2.0}, {"fps": 1.0}],
        [{"policy": "transformers_qwen2_vl"}, {"policy": "vllm", "fps": 1.0}],
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_first_differing_frame_of_two_traces(tmp_path, clip, sides, suffix):
    made = [watched(clip, **side) for side in sides]
    paths = [tmp_path / f"{name}.{suffix}" for name in ("rollout", "train")]
    for path, (sample, _, _) in zip(paths, made, strict=True):
        assert mp.validate([sample]) == []
        mp.write_trace(path, [sample])
    report = mp.compare(*paths)
    assert report.first.cause == "frame_sampling"
    place, differing = by_numpy(*(plan.indices for _, plan, _ in made))
    document = json.loads(report.to_json())["first"]["frames"]
    assert (document["by"], document["place"]) == ("frame_indices", place)
    assert document["differing"] == differing
    line = next(str(f) for f in report.findings if (f.field, f.index) == ("media", 0))
    assert f"{differing} of {max(len(plan.indices) for _, plan, _ in made)} differ" in line
    for name, (_, plan, _) in zip(("rollout", "train"), made, strict=True):
        found, index = document[name], plan.indices[place]
        assert (found["index"], found["frames"]) == (index, len(plan.indices))
        assert found["timestamp"] == plan.timestamps[place]
        assert seconds_of(found["time"]) == pytest.approx(index / FPS, abs=5e-4)
        assert found["policy"] == plan.policy
        assert f"{name} frame {index} at {found['time']}" in line
    settings = [plan.settings for _, plan, _ in made]
    unlike = {k for k in settings[0] | settings[1] if settings[0].get(k) != settings[1].get(k)}
    assert set(document["settings"]) == unlike
    if made[0][1].policy == made[1][1].policy:
        assert "fps: rollout 2.0, train 1.0" in line
    else:
        assert f"policy: rollout {made[0][1].policy}, train {made[1][1].policy}" in line


def test_two_wrapped_processors(clip):
    from mmpack.demo.qwen_processor import qwen_vl_processor

    hf = qwen_vl_processor("qwen2_5_vl", min_pixels=4 * 28 * 28, max_pixels=6 * 28 * 28)
    content = [{"type": "video", "video": clip.name}, {"type": "text", "text": "Where?"}]
    sides = []
    for policy in POLICIES:
        wrapped = mp.wrap_processor(
            hf, video_policy=policy, video_settings={"fps": 2.0}, media_root=clip.parent
        )
        turn = [{"role": "user", "content": content}]
        sides.append(wrapped(turn, response_ids=[40, 41], sample_id="s"))
    report = mp.compare(*([s] for s in sides))
    assert report.first.cause == "frame_sampling"
    place, differing = by_numpy(*(s.media[0].frame_indices for s in sides))
    assert (report.first.frames.place, report.first.frames.differing) == (place, differing)
    assert report.first.frames.rollout.policy == POLICIES[0]
    assert not [name for name in report.not_compared if name.startswith("processor.video.sampling")]
    assert mp.compare([sides[0]], [copy.deepcopy(sides[0])]).ok


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_seconds_that_an_engine_cast(tmp_path, clip, side, suffix):
    """As vLLM does: whose they are is found, and the dtype where the trace has it."""
    exact, _, _ = watched(clip, policy="transformers_qwen2_vl")
    found = torch.tensor(exact.media[0].second_per_grid_ts)

    def first(seconds, engine):
        other = copy.deepcopy(exact)
        other.media[0].second_per_grid_ts = seconds
        other.metadata = engine
        made = {"rollout": exact, "train": exact} | {side: other}
        for name, sample in made.items():
            mp.write_trace(tmp_path / f"{name}.{suffix}", [sample])
        first = mp.compare(tmp_path / f"rollout.{suffix}", tmp_path / f"train.{suffix}").first
        assert first.cause == "second_per_grid_ts"
        return first.evidence

    cast = found.bfloat16().item()
    known = {"engine": {"dtype": "bfloat16"}}
    assert first(cast, known).endswith(f": {side}'s engine casts it to bfloat16")
    assert first(cast, {}).endswith(f": maybe {side}'s was cast to bfloat16")
    assert " cast" not in first(cast, {"engine": {"dtype": "float32"}})
    for other in (1.0, 1.5):
        assert " cast" not in first(other, {}) and " cast" not in first(other, known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_assumed_frames_a_second_that_an_engine_cast(clip, dtype):
    """Two frames of the 24 a second that transformers assumes; no times to tell it by."""
    known, _, _ = watched(clip, policy="transformers_qwen2_vl")
    other = copy.deepcopy(known)
    other.media[0].fps = other.media[0].frame_timestamps = None
    other.media[0].second_per_grid_ts = torch.tensor(2 / 24).to(dtype).item()
    assert mp.compare([other], [known]).first.cause == "fps_missing"


def test_one_second_is_assumed_and_not_cast(clip):
    """bfloat16 of 1.001, of 30000/1001 frames a second, is 1."""
    exact, _, _ = watched(clip, policy="transformers_qwen2_vl")
    other = copy.deepcopy(exact)
    exact.media[0].second_per_grid_ts, other.media[0].second_per_grid_ts = 1.001, 1.0
    assert " cast" not in mp.compare([exact], [other]).first.evidence
    for odd in (0.0, 1e300, 10**400):
        other.media[0].second_per_grid_ts = odd
        assert " cast" not in mp.compare([exact], [other]).first.evidence


# ---- one recorded video, changed ------------------------------------------------------------------


@pytest.fixture(scope="module")
def video(clip):
    return watched(clip)[0]


def changed(sample, **fields):
    out = copy.deepcopy(sample)
    for name, value in fields.items():
        setattr(out.media[0], name, value)
    if "content_hash" in fields:
        out.media[0].cache_key = fields["content_hash"][::-1]
    return out


def found(left, right):
    report = mp.compare([left], [right])
    return report.first, list(report.causes)


def test_times_alone(video):
    stamps = video.media[0].frame_timestamps
    late = (*stamps[:3], *(s + 7.5 for s in stamps[3:]))
    first, causes = found(
        *(changed(video, frame_indices=None, frame_timestamps=t) for t in (stamps, late))
    )
    assert causes == ["unknown"]
    assert (first.frames.by, first.frames.place) == ("frame_timestamps", 3)
    assert first.frames.train.timestamp == late[3] and first.frames.train.index is None
    assert f"train at {first.frames.train.time}" in first.evidence


def test_a_frame_more_is_the_first_that_differs(video):
    medium = video.media[0]
    more = np.append(medium.frame_indices, FRAMES - 1)
    first, causes = found(video, changed(video, frame_indices=more, frame_timestamps=None))
    assert causes[0] == "frame_sampling"
    assert first.frames.place == len(medium.frame_indices) == first.frames.rollout.frames
    assert first.frames.rollout.index is None and first.frames.train.index == FRAMES - 1
    assert first.frames.differing == 1
    assert "rollout none" in first.evidence
    # by the rate: no time was recorded
    assert first.frames.train.timestamp == pytest.approx((FRAMES - 1) / FPS)


def test_what_was_not_recorded_is_not_made_up(video):
    bare = changed(video, frame_timestamps=None, fps=None)
    bare.processor = None
    other = changed(bare, frame_indices=video.media[0].frame_indices - 0)
    other.media[0].frame_indices[2] += 1
    first, causes = found(bare, other)
    assert causes == ["frame_sampling"]
    for frame in (first.frames.rollout, first.frames.train):
        assert (frame.timestamp, frame.time, frame.policy) == (None, None, None)
    assert first.frames.settings == {}
    assert "policy" not in first.evidence


def test_the_plan_of_a_medium_goes_before_the_processors(video):
    own = {"policy": "by_hand", "every": 10, "odd": [1, 2]}
    left = changed(video, metadata={"sampling": own})
    right = changed(video, frame_indices=video.media[0].frame_indices + 1)
    first, _ = found(left, right)
    assert first.frames.rollout.policy == "by_hand"
    assert first.frames.settings["every"] == (10, None)
    assert json.loads(json.dumps(asdict(first.frames)))["settings"]["odd"] == ["[1, 2]", None]


def test_times_that_are_none(video):
    left, right = (
        changed(video, frame_indices=None, frame_timestamps=(t,) * 10) for t in (0.0, math.nan)
    )
    report = mp.compare([left], [right])
    assert not report.ok and "MM009" in report.first.evidence
    report.to_json()


def test_times_less_than_a_millisecond_apart_are_shown_in_full(video):
    stamps = video.media[0].frame_timestamps
    near = (*stamps[:4], stamps[4] + 1e-4, *stamps[5:])
    first, _ = found(video, changed(video, frame_timestamps=near))
    assert str(first.frames.rollout) == str(first.frames.train)
    assert repr(near[4]) in first.evidence and repr(stamps[4]) in first.evidence


def test_a_turned_video(video):
    for name in ("size", "decoded_size"):
        turned = {name: getattr(video.media[0], name)[::-1]}
        left, right = changed(video), changed(video, content_hash="e" + "0" * 63, **turned)
        for a, b in ((left, right), (right, left)):
            first, causes = found(a, b)
            assert causes == ["video_rotation"] and name in first.evidence
    strange = changed(right, file_hash="d" * 64)
    assert found(video, strange)[1] == ["unknown"]
    square = changed(video, size=(90, 90), content_hash="e" + "0" * 63)
    assert "video_rotation" not in found(video, square)[1]


@pytest.mark.parametrize("fields", [{"total_frames": FRAMES + 2}, {"fps": 30.0}])
def test_a_container_that_was_read_in_two_ways(video, fields):
    first, causes = found(video, changed(video, **fields))
    assert causes == ["video_metadata"]
    assert next(iter(fields)) in first.evidence
    assert found(*(changed(s, file_hash=None) for s in (video, changed(video, **fields))))[1] == [
        "unknown"
    ]


def test_a_rate_that_was_rounded_is_no_other_reading(video):
    left, right = changed(video, fps=30000 / 1001), changed(video, fps=29.97)
    assert mp.compare([left], [right]).ok
    assert found(left, changed(video, fps=29.98))[1] == ["unknown"]


def test_times_of_a_varying_rate(video):
    medium = video.media[0]
    real = tuple(1.3 * t for t in medium.frame_timestamps)
    for a, b, even in ((video, real, "rollout"), (real, video, "train")):
        sides = [
            s if isinstance(s, mp.Sample) else changed(video, frame_timestamps=s) for s in (a, b)
        ]
        first, causes = found(*sides)
        assert causes == ["video_metadata"]
        assert f"{even}'s are frame_indices / fps" in first.evidence
        assert first.frames.by == "frame_timestamps"
    rounded = tuple(round(t, 1) for t in medium.frame_timestamps)
    assert "video_metadata" not in found(video, changed(video, frame_timestamps=rounded))[1]


def test_the_same_frames_of_other_pixels(video):
    first, causes = found(video, changed(video, content_hash="e" + "0" * 63))
    assert causes == ["frame_pixels"]
    assert (first.frames.by, first.frames.place) == ("content_hash", None)
    for name in ("size", "frame_indices"):
        sides = [changed(video, **{name: None}), changed(video, content_hash="e" + "0" * 63)]
        assert found(*sides)[1] == ["unknown"]


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("fps", 1.0, "frame_sampling"),
        ("policy", "another", "unknown"),
        ("max_pixels", 1, "max_pixels"),
        ("cap_pixels_per_frame", True, "video_budget"),
        ("patch_size", 1, "unknown"),
    ],
)
def test_settings_of_equal_frames_that_differ(video, name, value, cause):
    other = changed(video)
    other.processor["video"]["sampling"][name] = value
    first, causes = found(video, other)
    assert causes == [cause] and first.field == "processor"
    assert f"processor.video.sampling.{name}" in first.evidence


def test_another_policy_of_equal_frames_names_no_other_frames(video):
    """Sizes follow from a policy as well: where only they differ, they are what it did."""
    medium = video.media[0]
    t, h, w = medium.grid_thw
    other = changed(video, grid_thw=(t, h + 2, w))
    other.processor["video"]["sampling"]["policy"] = "another"
    _, causes = found(video, other)
    assert "video_budget" in causes and "frame_sampling" not in causes
    other.media[0].frame_indices = medium.frame_indices + 1
    assert "frame_sampling" in found(video, other)[1]


@given(st.floats(-1e7, 1e7))
def test_clock(seconds):
    shown = clock(seconds)
    assert re.fullmatch(r"-?\d+:[0-5]\d\.\d{3}", shown)
    assert seconds_of(shown) == pytest.approx(seconds, abs=5.1e-4)
    assert [clock(s) for s in (0, 59.9994, 59.9996, 3600, -0.0001)] == [
        "0:00.000",
        "0:59.999",
        "1:00.000",
        "60:00.000",
        "0:00.000",
    ]


@pytest.mark.parametrize("size", [(0, 64), (64, 0)])
def test_a_size_without_area_is_compared(video, size):
    for pair in ((video, changed(video, size=size)), (changed(video, size=size), video)):
        assert found(*pair)[1] == ["unknown"]


def test_any_two_changes(video):
    medium = video.media[0]
    changes = [
        {},
        {"frame_indices": medium.frame_indices + 1},
        {"frame_indices": medium.frame_indices[::-1].copy()},
        {"frame_timestamps": tuple(1.3 * t for t in medium.frame_timestamps)},
        {"frame_timestamps": medium.frame_timestamps[::-1]},
        {"frame_timestamps": medium.frame_timestamps[:-1]},
        {"frame_timestamps": (-1.0, *medium.frame_timestamps[1:])},
        {"content_hash": "e" + "0" * 63},
        {"size": medium.size[::-1]},
        {"decoded_size": medium.decoded_size[::-1]},
        {"total_frames": 139},
        {"total_frames": 137},
        {"total_frames": None},
        {"fps": 30.0},
        {"frame_indices": None},
        {"frame_timestamps": None},
        {"frame_indices": None, "frame_timestamps": None, "total_frames": None},
    ]
    left, right = [], []
    for i, (one, two) in enumerate((a, b) for a in changes for b in changes):
        for side, fields in ((left, one), (right, two)):
            side.append(changed(video, **fields))
            side[-1].sample_id = f"video-{i}"
    report = mp.compare(left, right, max_findings=10**6)
    named = {"frame_sampling", "frame_pixels", "video_rotation", "video_metadata"}
    assert named <= set(report.causes) and any(f.frames for f in report.findings)


def test_a_report_of_equal_videos_opens_no_file(video, clip):
    """`pictures` is asked for nothing, and no path below the root is named: the two frames' figures are not there."""

    class Asked(dict):
        def get(self, *key):
            pytest.fail(f"looked for {key}")

    other = changed(video, frame_indices=video.media[0].frame_indices + 1)
    differing, equal = (mp.compare([video], [right]) for right in (other, changed(video)))
    assert "data:image/png" in differing.to_html(media_root=clip.parent)
    assert "data:image/png" not in equal.to_html(media_root=clip.parent, pictures=Asked())
