"""Plans of odd clips, what is recorded of a plan, and the errors."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marked_clips import clip as file_of
from support.process import run_python
from support.video_infos import clip

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.layout.seconds import frame_seconds
from mmpack.video import FramePlan, probe, sample
from mmpack.video.policies.registry import POLICIES

QWEN2 = {"qwen_vl_utils": {}, "transformers_qwen2_vl": {"fps": 2.0}, "vllm": {}}
QWEN3 = {
    "qwen_vl_utils": {"model": "qwen3_vl"},
    "transformers_qwen3_vl": {},
    "vllm": {"model": "qwen3_vl"},
}
ALL = [*QWEN2.items(), *QWEN3.items()]


def refused(match, info, **settings):
    with pytest.raises(ArgumentError, match=match) as caught:
        sample(info, **settings)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_fps_missing():
    info = clip(100, None, 320, 240)
    plan = sample(info, policy="transformers_qwen3_vl")
    assert plan.fps_assumed and plan.fps == 24.0
    assert plan.timestamps == tuple(i / 24 for i in plan.indices)
    assert plan.medium_fields()["fps"] is None  # what was assumed is not what the file says
    whole = sample(info, policy="transformers_qwen2_vl")
    assert whole.second_per_grid_ts == 2 / 24 and whole.num_frames == 100
    refused("no frame rate", info, policy="qwen_vl_utils")
    for policy in POLICIES:
        refused("no frames", clip(0), policy=policy)


def test_one_frame():
    """Less than a temporal patch: refused by most, repeated by Qwen2-VL's processor and, before 5.15, Qwen3-VL's."""
    info = clip(1, 25.0)
    plan = sample(info, policy="transformers_qwen2_vl")
    assert (plan.indices, plan.grid_thw[0], plan.num_tokens) == ((0,), 1, 13 * 23)
    old = sample(info, policy="transformers_qwen3_vl", transformers="5.8")
    assert (old.indices, old.grid_thw[0], old.patch_timestamps) == ((0,), 1, (0.0,))
    for policy, more in ALL:
        refused("image|every frame", info, policy=policy, **more)


def test_more_frames_than_there_are():
    """Steps of upstream: transformers can't read what they ask for, vLLM takes the last frame."""
    info = clip(10, 25.0)
    repeated = sample(info, policy="transformers_qwen3_vl", num_frames=15)
    assert repeated.num_frames == 15 and len(set(repeated.indices)) == 10
    assert list(repeated.indices) == sorted(repeated.indices)
    assert sample(info, policy="vllm", loader="opencv", num_frames=16).num_frames == 10
    refused("2 to 10", info, policy="qwen_vl_utils", nframes=16)
    refused("leave frames", info, policy="qwen_vl_utils", video_start=0.3, video_end=0.31)
    info = clip(34, 25.0)
    refused("frame 34 of 34", info, policy="transformers_qwen2_vl", num_frames=14)
    plan = sample(info, policy="vllm", fps=14 / 34 * 25.0 + 1e-9)
    assert plan.indices[-1] == 33 and plan.num_frames == 15


def test_variable_rate():
    """The policy counts frames, as upstream; the container's times stand beside."""
    times = [0, 40, 50, 60, 400, 800, 1000, 1040, 1500, 2000]
    info = probe(file_of(10, times=times, container="matroska"))
    assert info.variable
    plan = sample(info, policy="vllm", model="qwen3_vl")
    assert plan.timestamps == tuple(i / info.fps for i in plan.indices)
    assert plan.container_timestamps == pytest.approx([times[i] / 1000 for i in plan.indices])
    assert plan.container_timestamps != pytest.approx(plan.timestamps, abs=0.05)


def test_unknown_names_and_numbers_beyond_all_measure():
    info, huge = clip(100), 10**400
    refused("qwen_vl_utils, transformers_qwen2_vl", info, policy="uniform")
    refused("has no setting 'frames'.*nframes", info, policy="qwen_vl_utils", frames=3)
    refused("'qwen3_vl' is unknown", info, policy="transformers_qwen2_vl", model="qwen3_vl")
    refused("loader 'cv' is unknown.*opencv_dynamic", info, policy="vllm", loader="cv")
    refused("reads no num_frames", info, policy="vllm", num_frames=8)
    refused("expected float", info, policy="vllm", fps="2")
    refused("expected int", info, policy="qwen_vl_utils", nframes=True)
    refused("pass a positive number", info, policy="vllm", fps=float("nan"))
    refused("both set", info, policy="qwen_vl_utils", fps=2.0, nframes=8)
    refused("5.15", info, policy="transformers_qwen3_vl", transformers="4")
    refused("can't be resized", clip(10, 5.0, 3000, 10), policy="qwen_vl_utils")
    refused("at most 1024", info, policy="qwen_vl_utils", patch_size=10**12)
    pixels = {"min_pixels": 10**12, "max_pixels": 10**13}
    refused("are not pictures", info, policy="transformers_qwen2_vl", fps=2.0, **pixels)
    refused("too large for 100 frames", info, policy="transformers_qwen3_vl", fps=1e308)
    refused("more than the 1048576", info, policy="transformers_qwen3_vl", num_frames=10**9)
    dynamic = {"policy": "vllm", "loader": "opencv_dynamic"}
    refused("1048576 steps", info, fps=1e12, **dynamic)
    assert sample(info, max_duration=1, fps=1e308, **dynamic).num_frames == 100
    for policy in POLICIES:
        refused(
            "setting min_pixels is a number beyond 64 bits", info, policy=policy, min_pixels=huge
        )


clips = st.builds(
    clip,
    st.integers(2, 400),
    st.sampled_from([None, 10.0, 24000 / 1001, 25.0, 30.0]),
    st.integers(32, 1000),
    st.integers(32, 1000),
)
asked = st.sampled_from([*ALL, ("transformers_qwen2_vl", {"num_frames": 2})])


@settings(max_examples=60)
@given(clips, asked)
def test_round_trips(info, asked):
    """JSON both ways; and out of what a trace records: Medium and processor settings."""
    policy, given = asked
    try:
        plan = sample(info, policy=policy, **given)
    except ArgumentError:
        assert info.fps is None or min(info.width, info.height) * 200 < max(info.width, info.height)
        return
    assert FramePlan.from_json(plan.to_json()) == plan
    medium = mp.Medium("video", "video", "0" * 64, **plan.medium_fields())
    stored = mp.Medium.from_dict(
        json.loads(json.dumps(medium.to_dict(numpy=True), default=np.ndarray.tolist)), "medium"
    )
    sampling = json.loads(json.dumps(plan.processor_settings()))
    without_times = dataclasses.replace(plan, container_timestamps=None)
    assert FramePlan.from_medium(stored, sampling) == without_times
    family = get_family(plan.settings["model"])
    assert plan.num_tokens == family.vision_tokens(plan.grid_thw)
    if plan.patch_timestamps is not None:
        assert frame_seconds(stored, family) == list(plan.patch_timestamps)


@pytest.mark.parametrize(
    "change",
    [
        {"indices": [0, 1.5]},
        {"fps": True},
        {"size": [1, 2, 3]},
        {"grid_thw": None},
        {"colour": "red"},
    ],
)
def test_damaged_json(change):
    values = sample(clip(50), policy="qwen_vl_utils").to_dict() | change
    with pytest.raises(ArgumentError, match=f"{next(iter(change))}.*Fix: "):
        FramePlan.from_json(json.dumps(values))
    del values[next(iter(change))], values["fps_assumed"]
    with pytest.raises(ArgumentError, match="is missing"):
        FramePlan.from_json(json.dumps(values))
    for text in ("", "[]", "nonsense"):
        with pytest.raises(ArgumentError, match="FramePlan: not"):
            FramePlan.from_json(text)


GRID = sample(clip(50), policy="qwen_vl_utils").grid_thw


@pytest.mark.parametrize(
    "change",
    [
        {"indices": []},
        {"indices": [3, 0, 9, 49]},
        {"indices": [0, 16, 33, 50]},
        {"timestamps": [0.0]},
        {"timestamps": [0.0, 0.1, 0.2, float("nan")]},
        {"patch_timestamps": [0.0]},
        {"fps": 0.0},
        {"second_per_grid_ts": -1.0},
        {"counted_frames": 51},
        {"source_size": [0, 360]},
        {"size": [641, 364]},
        {"grid_thw": [GRID[0] + 1, *GRID[1:]]},
        {"settings": {}},
    ],
    ids=str,
)
def test_plans_that_contradict_themselves(change):
    values = sample(clip(50), policy="qwen_vl_utils").to_dict()
    assert len(values["indices"]) == 4
    with pytest.raises(ArgumentError, match=rf"^FramePlan: {next(iter(change))} .*Fix: [^\n]*$"):
        FramePlan.from_dict(values | change)


def test_what_is_no_plan():
    plan = sample(clip(50), policy="qwen_vl_utils")
    values = plan.to_dict()
    deep = "[" * 100_000 + "]" * 100_000
    for text in (None, deep, b"\xff", json.dumps(values | {"fps": 10**400})):
        with pytest.raises(ArgumentError, match=r"^FramePlan: .*Fix: [^\n]*$"):
            FramePlan.from_json(text)
    for odd in (None, values | {3: 1}):
        with pytest.raises(ArgumentError, match=r"^FramePlan: .*Fix: [^\n]*$"):
            FramePlan.from_dict(odd)
    with pytest.raises(ArgumentError, match="has no setting 'colour'"):
        FramePlan.from_dict(values | {"settings": values["settings"] | {"colour": 1}})
    fields = plan.medium_fields() | {"frame_timestamps": None}
    with pytest.raises(ArgumentError, match="no frame_timestamps"):
        FramePlan.from_medium(mp.Medium("f", "video", "0" * 64, **fields), {"policy": plan.policy})
    other = dataclasses.replace(plan, fps_assumed=True)  # hashed, and owns its settings
    assert len({plan, FramePlan.from_json(plan.to_json()), other}) == 2
    other.settings["fps"] = 9.0
    assert plan.settings["fps"] == 2.0


def test_sampling_loads_no_torch():
    code = """
import sys
import mmpack.video
assert "av" not in sys.modules and "torch" not in sys.modules
import mmpack.video.choose_frames, mmpack.video.policies.registry
assert callable(mmpack.video.sample) and callable(mmpack.video.decode)
for policy in mmpack.video.policies.registry.POLICIES.values():
    assert policy.resolve({}).patch_size
assert "torch" not in sys.modules
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
