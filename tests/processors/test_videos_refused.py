"""Videos, settings and recorded Mediums that must not pass silently; and settings that must."""

import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image

import mmpack as mp
from mmpack.demo.clips import clip_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError
from mmpack.video import FramePlan, decode, drop_frames, mask_frames, plan_patches, sample

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def files():
    return [exercise.video for exercise in clip_exercises(2)]


@pytest.fixture
def make(qwen_tok, tmp_path, files):
    (tmp_path / "a.mp4").write_bytes(files[0])

    def make(family="qwen2_5_vl", **options):
        hf = qwen_vl_processor(family, tokenizer=qwen_tok, min_pixels=3136, max_pixels=99 * 28 * 28)
        return mp.wrap_processor(
            hf, media_root=tmp_path, **({"video_settings": {"fps": 2.0}} | options)
        )

    return make


def ask(item, **part):
    return [{"role": "user", "content": [{"type": "video", "video": item, **part}]}]


def refused(match, call, *args, **options):
    with pytest.raises(ArgumentError, match=match) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and "Fix: " in message and " at 0x" not in message


def recorded(processor, **changes):
    """A video as a trace has it."""
    medium = processor(ask("a.mp4"), sample_id="s").media[0]
    return dataclasses.replace(medium, pixel_values=None, **changes)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"video_settings": {"patch_size": 16}}, "patch_size of video_settings is 16, qwen2_5_vl"),
        ({"video_settings": {"model": "qwen2_vl"}}, "model of video_settings is 'qwen2_vl'"),
        ({"video_settings": {"fps": 2.0, "num_frames": 8}}, "both set"),
        ({"video_settings": 5}, "video_settings is int"),
        ({"video_policy": []}, r"policy \[\] is unknown"),
        ({"frame_cache": "/tmp/x"}, "frame_cache is str"),
        ({"decode_threads": 0}, "decode_threads: 0"),
    ],
)
def test_wrapping_refuses(make, options, match):
    refused(match, make, **options)


@pytest.mark.parametrize(
    ("kind", "name"), [("video", "fps"), ("video", "max_pixels"), ("image", "resized_height")]
)
def test_settings_beside_a_medium(make, kind, name):
    item = "a.mp4" if kind == "video" else Image.new("RGB", (56, 56))
    messages = [{"role": "user", "content": [{"type": kind, kind: item, name: 5}]}]
    refused(f"has '{name}' beside the {kind}", make(), messages, sample_id="s")


def test_masked_frames_are_not_decoded_again(make, tmp_path, files):
    processor = make()
    whole = processor(ask("a.mp4"), [1, 2], sample_id="s")
    plan = sample(files[0], **processor.settings["video"]["sampling"])
    frames = processor.clip("a.mp4").frames
    for changed in (
        mask_frames(whole, 0, [0]),
        mask_frames(whole, 0, [0], frames=frames),
        drop_frames(whole, 0, [1]),
    ):
        mp.write_trace(tmp_path / "t.jsonl", [changed])
        [read] = mp.read_trace(tmp_path / "t.jsonl")
        for item in (read.media[0], (files[0], read.media[0])):
            refused(
                "was changed after decoding .* Fix: keep its pixel_values",
                make().from_ids,
                read.input_ids,
                media=[item],
                sample_id="s",
            )
            refused("was changed after decoding", make().clip, item)
    black = frames.copy()
    black[: plan.settings["temporal_patch_size"]] = 0
    masked = mask_frames(whole, 0, [0], frames=frames)
    again = make().from_ids(masked.input_ids, media=[(black, masked.media[0])], sample_id="s")
    assert np.array_equal(again.media[0].pixel_values, masked.media[0].pixel_values)


def test_dropped_frames_that_have_their_hash_are_decoded_again(make):
    processor = make()
    whole = processor(ask("a.mp4"), sample_id="s")
    shorter = drop_frames(whole, 0, [1], frames=processor.clip("a.mp4").frames)
    item = dataclasses.replace(shorter.media[0], pixel_values=None)
    again = make().from_ids(shorter.input_ids, media=[item], sample_id="s")
    assert again.media[0].cache_key == shorter.media[0].cache_key
    assert np.array_equal(again.media[0].pixel_values, shorter.media[0].pixel_values)


def test_a_file_beside_a_recorded_video_is_the_one_recorded(make, files):
    processor = make()
    medium = recorded(processor)
    other = files[0] + b"\0"
    refused("not the video that was recorded .file_hash", processor.medium, (other, medium))
    refused("not the video that was recorded .file_hash", processor.clip, (other, medium))
    bare = dataclasses.replace(medium, file_hash=None, content_hash="0" * 64)
    refused("not the video that was recorded .content_hash", processor.medium, (other, bare))
    frames = processor.clip("a.mp4").frames
    refused(
        "not the video that was recorded .content_hash", processor.medium, (255 - frames, medium)
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"metadata": {"sampling": 5}}, "sampling of 'video:.* is int"),
        ({"fps": float("nan")}, "fps of .* is nan"),
        ({"frame_timestamps": (0.0,)}, "frame_timestamps of"),
        ({"second_per_grid_ts": float("inf")}, "second_per_grid_ts of"),
        ({"grid_thw": (9, 2, 2)}, "grid_thw of"),
    ],
)
def test_recorded_videos_that_make_no_plan(make, changes, match):
    processor = make()
    ids = processor(ask("a.mp4"), sample_id="s").input_ids
    refused(match, processor.from_ids, ids, media=[recorded(processor, **changes)], sample_id="s")


def test_recorded_settings_are_completed(make):
    """A trace of someone who wrote down only what was set."""
    processor = make()
    sampling = processor.settings["video"]["sampling"]
    low = ("min_pixels", "merge_size", "min_frames")
    part = {k: v for k, v in sampling.items() if k not in low}
    medium = recorded(processor)
    plan = FramePlan.from_medium(medium, part)
    assert plan.settings.keys() == sampling.keys() - {"policy"}
    medium.metadata = {"sampling": part}
    assert processor.medium(medium).cache_key == medium.cache_key


@pytest.mark.parametrize(
    ("about", "match"),
    [
        ({"fps": "abc"}, "fps is 'abc'"),
        ({"fps": float("inf")}, "fps is inf"),
        ({"fps": 2.0, "total_num_frames": "x"}, "total_num_frames is 'x'"),
        ({"fps": 2.0, "total_num_frames": 2.7}, "total_num_frames is 2.7"),
        ({"fps": 2.0, "total_num_frames": 0}, "total_num_frames is 0"),
        ({"fps": 2.0, "frames_indices": ["a"] * 4}, "frames_indices is 'a'"),
        ({"fps": 2.0, "frames_indices": [3, 2, 1, 0]}, "frames_indices has 2 after 3"),
        ({"fps": 2.0, "frames_indices": 5}, "frames_indices is 5"),
        ({"fps": 2.0, 5: 1, "speed": 1}, "5 is unknown"),
        ({"fps": 30, "total_num_frames": 3}, "no frames_indices, but there are 4 frames of 3"),
        ({"fps": 30, "duration": 12.67}, "duration is 12.67 s, but 4 frames at 30 per second take"),
        (
            {"fps": 30, "duration": 3.0, "frames_indices": [0, 9, 99, 379]},
            "duration is 3 s, but 380 frames at 30",
        ),
        (
            {
                "fps": 25,
                "duration": 12.67,
                "total_num_frames": 380,
                "frames_indices": [0, 9, 99, 379],
            },
            "at 25 per",
        ),
        (
            {"fps": 2.0, "do_sample_frames": True},
            "do_sample_frames is true, but frames handed in are not sampled",
        ),
        ({"fps": 2.0, "width": 640}, "width and height are 640 and None"),
        ({"fps": 2.0, "width": 640, "height": 0}, "height is 0"),
    ],
)
def test_what_is_told_of_frames(make, about, match):
    refused(match, make().medium, (np.zeros((4, 64, 64, 3), np.uint8), about))


def test_a_frames_number_twice(make):
    about = {"fps": 2.0, "frames_indices": [0] * 4}
    unlike = np.eye(4, 64 * 64 * 3, dtype=np.uint8).reshape(4, 64, 64, 3)
    refused("has 0 twice, but frames 0 and 1 differ", make().medium, (unlike, about))
    assert make().medium((np.zeros_like(unlike), about)).num_tokens
    refused("there are no frames", make().medium, ([], {"fps": 2.0}))


def test_one_frame_is_no_video():
    """Qwen's own loader takes two at least; an AVIF is read as a clip of one."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(file, "AVIF")
    refused(
        "has 1 of the 2 frames .*Fix: pass it as an image",
        lambda data: mp.video.sample(data, policy="qwen_vl_utils", model="qwen2_5_vl"),
        file.getvalue(),
    )


@pytest.mark.parametrize(
    "more", [{}, {"duration": 12.7}, {"total_num_frames": 380}, {"do_sample_frames": False}]
)
def test_what_agrees_with_the_frames(make, more):
    about = {"fps": 30, "frames_indices": [0, 9, 99, 379], "width": 640, "height": 360, **more}
    medium = make().medium((np.zeros((4, 64, 96, 3), np.uint8), about))
    assert medium.total_frames == (381 if "duration" in more else 380)
    assert (medium.decoded_size, medium.size) == ((640, 360), (96, 64))
    assert medium.frame_timestamps == (0.0, 0.3, 3.3, 379 / 30)


def test_metadata_of_transformers(make):
    from transformers.video_utils import VideoMetadata

    frames, about = np.zeros((4, 64, 64, 3), np.uint8), VideoMetadata(380, 30.0, 640, 360, 380 / 30)
    refused("has no frames_indices, but there are 4 frames of 380", make().medium, (frames, about))
    about.frames_indices = np.array([0, 9, 99, 379])
    assert make().medium((frames, about)).frame_timestamps == (0.0, 0.3, 3.3, 379 / 30)


def test_decode_takes_plans_and_numbers(files):
    plan = sample(files[0], policy="vllm")
    refused("sample: FramePlan is not a video", sample, plan, policy="vllm")
    refused("frames is PatchPlan", decode, files[0], plan_patches([(4, 3, 56, 56)], "qwen2_5_vl"))
    refused(r"frames is \[0\], expected int", decode, files[0], [[0], [1, 2]])
    refused("limits is int", decode, files[0], [0], limits=5)
    refused("cache is str", decode, files[0], [0], cache="x")
    refused("threads: 65.* Fix: pass 1 to 64", decode, files[0], [0], threads=65)
    other = dataclasses.replace(plan, source_size=(120, 160), loaded_size=(120, 160))
    refused(r"of 160×120, but the plan is for one with 120×160", decode, files[0], other)


def test_the_other_kind_of_part(make, files):
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    for item, kind, other in (
        (file.getvalue(), "video", "image"),
        ("a.mp4", "image", "video"),
        (Image.new("RGB", (64, 64)), "video", "image"),
    ):
        messages = [{"role": "user", "content": [{"type": kind, kind: item}]}]
        refused(re.escape(f'{{"type": "{other}", …}}'), make(), messages, sample_id="s")
