"""Videos that differ: frames, times and rates as recorded, and timestamps in the text (Qwen3-VL); whose, and why."""

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
from support.planting.episodes import episode, finish, other, settings
from support.planting.said import check
from support.samples import make_medium

import mmpack as mp
from mmpack.parity.frame_difference import clock
from mmpack.schema.spans import LossSpan, ModalitySpan

ELSE = "e" + "0" * 63


# ---- frames of a file ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("video") / "video.mp4")


@pytest.fixture(scope="module")
def video(file):
    return watched(file)[0]


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
    ("suffix", "sides"),
    [
        ("jsonl", [{"policy": "qwen_vl_utils"}, {"policy": "transformers_qwen2_vl"}]),
        ("parquet", [{"fps": 2.0}, {"fps": 1.0}]),
        ("jsonl", [{"policy": "transformers_qwen2_vl"}, {"policy": "vllm", "fps": 1.0}]),
    ],
)
def test_the_first_differing_frame_of_two_traces(tmp_path, file, sides, suffix):
    made = [watched(file, **side) for side in sides]
    paths = [tmp_path / f"{name}.{suffix}" for name in ("rollout", "train")]
    for path, (sample, _, _) in zip(paths, made, strict=True):
        assert mp.validate([sample]) == []
        mp.write_trace(path, [sample])
    report = mp.compare(*paths)
    assert report.first.cause == "frame_sampling"
    place, differing = by_numpy(*(plan.indices for _, plan, _ in made))
    document = json.loads(report.to_json())["first"]["frames"]
    found = document["by"], document["place"], document["differing"]
    assert found == ("frame_indices", place, differing)
    line = next(str(f) for f in report.findings if (f.field, f.index) == ("media", 0))
    assert f"{differing} of {max(len(plan.indices) for _, plan, _ in made)} differ" in line
    for name, (_, plan, _) in zip(("rollout", "train"), made, strict=True):
        found, index = document[name], plan.indices[place]
        assert (found["index"], found["frames"]) == (index, len(plan.indices))
        assert found["timestamp"] == plan.timestamps[place] and found["policy"] == plan.policy
        assert seconds_of(found["time"]) == pytest.approx(index / FPS, abs=5e-4)
        assert f"{name} frame {index} at {found['time']}" in line
    settings_ = [plan.settings for _, plan, _ in made]
    unlike = {k for k in settings_[0] | settings_[1] if settings_[0].get(k) != settings_[1].get(k)}
    assert set(document["settings"]) == unlike
    policies = [plan.policy for _, plan, _ in made]
    words = f"policy: rollout {policies[0]}, train {policies[1]}"
    assert (words if len({*policies}) > 1 else "fps: rollout 2.0, train 1.0") in line


def test_two_wrapped_processors(file):
    from mmpack.demo.qwen_processor import qwen_vl_processor

    hf = qwen_vl_processor("qwen2_5_vl", min_pixels=4 * 28 * 28, max_pixels=6 * 28 * 28)
    content = [{"type": "video", "video": file.name}, {"type": "text", "text": "Where?"}]
    sides = []
    for policy in ("qwen_vl_utils", "transformers_qwen2_vl"):
        keywords = {"video_policy": policy, "video_settings": {"fps": 2.0}}
        wrapped = mp.wrap_processor(hf, media_root=file.parent, **keywords)
        turn = [{"role": "user", "content": content}]
        sides.append(wrapped(turn, response_ids=[40, 41], sample_id="s"))
    report = mp.compare(*([s] for s in sides))
    assert report.first.cause == "frame_sampling"
    place, differing = by_numpy(*(s.media[0].frame_indices for s in sides))
    assert (report.first.frames.place, report.first.frames.differing) == (place, differing)
    assert not [name for name in report.not_compared if name.startswith("processor.video.sampling")]


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_seconds_that_an_engine_cast(file, side):
    """As vLLM does: whose they are is found, and the dtype where the trace has it."""
    exact, _, _ = watched(file, policy="transformers_qwen2_vl")

    def said(seconds, engine, known=exact):
        cast = changed(exact, second_per_grid_ts=seconds)
        cast.metadata = engine
        made = {"rollout": known, "train": known} | {side: cast}
        first = mp.compare([made["rollout"]], [made["train"]]).first
        assert first.cause in ("second_per_grid_ts", "unknown")
        return first.evidence

    cast = torch.tensor(exact.media[0].second_per_grid_ts).bfloat16().item()
    known = {"engine": {"dtype": "bfloat16"}}
    assert said(cast, known).endswith(f": {side}'s engine casts it to bfloat16")
    assert said(cast, {}).endswith(f": maybe {side}'s was cast to bfloat16")
    assert " cast" not in said(cast, {"engine": {"dtype": "float32"}})
    for odd in (1.0, 1.5, 0.0, 1e300, 10**400):
        assert " cast" not in said(odd, {})
    # bfloat16 of 1.001, of 30000/1001 frames a second, is 1: what is assumed
    assert " cast" not in said(1.0, {}, changed(exact, second_per_grid_ts=1.001))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_assumed_frames_a_second_that_an_engine_cast(file, dtype):
    """Two frames of the 24 a second that transformers assumes; no times to tell it by."""
    known, _, _ = watched(file, policy="transformers_qwen2_vl")
    seconds = torch.tensor(2 / 24).to(dtype).item()
    assumed = changed(known, fps=None, frame_timestamps=None, second_per_grid_ts=seconds)
    check(assumed, known, "fps_missing")


def changed(sample, **fields):
    """The sample with fields of its video set."""
    out = copy.deepcopy(sample)
    for name, value in fields.items():
        setattr(out.media[0], name, value)
    if "content_hash" in fields:
        out.media[0].cache_key = fields["content_hash"][::-1]
    return out


def test_times_alone(video):
    stamps = video.media[0].frame_timestamps
    late = (*stamps[:3], *(s + 7.5 for s in stamps[3:]))
    sides = (changed(video, frame_indices=None, frame_timestamps=t) for t in (stamps, late))
    frames = (first := check(*sides, "unknown").first).frames
    assert (frames.by, frames.place, frames.train.index) == ("frame_timestamps", 3, None)
    assert frames.train.timestamp == late[3] and f"train at {frames.train.time}" in first.evidence
    near = (*stamps[:4], stamps[4] + 1e-4, *stamps[5:])  # less than a millisecond: in full
    first = check(video, changed(video, frame_timestamps=near), "unknown").first
    assert str(first.frames.rollout) == str(first.frames.train)
    assert repr(near[4]) in first.evidence and repr(stamps[4]) in first.evidence
    sides = (
        changed(video, frame_indices=None, frame_timestamps=(t,) * 10) for t in (0.0, math.nan)
    )
    check(*sides, "unknown", "MM009").to_json()


def test_a_frame_more_is_the_first_that_differs(video):
    medium = video.media[0]
    more = np.append(medium.frame_indices, FRAMES - 1)
    right = changed(video, frame_indices=more, frame_timestamps=None)
    frames = mp.compare([video], [right]).first.frames
    assert frames.place == len(medium.frame_indices) == frames.rollout.frames
    assert (frames.rollout.index, frames.train.index) == (None, FRAMES - 1)
    assert frames.differing == 1 and "rollout none" in str(frames)
    # by the rate: no time was recorded
    assert frames.train.timestamp == pytest.approx((FRAMES - 1) / FPS)
    bare = changed(video, frame_timestamps=None, fps=None)  # and nothing is made up
    bare.processor = None
    right = changed(bare, frame_indices=medium.frame_indices + (np.arange(len(more) - 1) == 2))
    frames = check(bare, right, "frame_sampling").first.frames
    for frame in (frames.rollout, frames.train):
        assert (frame.timestamp, frame.time, frame.policy) == (None, None, None)
    assert frames.settings == {} and "policy" not in str(frames)


def test_the_plan_of_a_medium_goes_before_the_processors(video):
    own = {"policy": "by_hand", "every": 10, "odd": [1, 2]}
    left = changed(video, metadata={"sampling": own})
    right = changed(video, frame_indices=video.media[0].frame_indices + 1)
    frames = mp.compare([left], [right]).first.frames
    assert frames.rollout.policy == "by_hand" and frames.settings["every"] == (10, None)
    assert json.loads(json.dumps(asdict(frames)))["settings"]["odd"] == ["[1, 2]", None]


def test_what_was_done_to_one_file(video):
    medium = video.media[0]
    for name in ("size", "decoded_size"):
        turned = changed(video, content_hash=ELSE, **{name: getattr(medium, name)[::-1]})
        check(video, turned, "video_rotation", name)
    check(video, changed(turned, file_hash="d" * 64), "unknown")
    square = changed(video, size=(90, 90), content_hash=ELSE)
    assert "video_rotation" not in mp.compare([video], [square]).causes
    frames = check(video, changed(video, content_hash=ELSE), "frame_pixels").first.frames
    assert (frames.by, frames.place) == ("content_hash", None)
    for name in ("size", "frame_indices"):
        check(changed(video, **{name: None}), changed(video, content_hash=ELSE), "unknown")
    for size in ((0, 64), (64, 0)):
        check(video, changed(video, size=size), "unknown")
    for name, value in (("total_frames", FRAMES + 2), ("fps", 30.0)):
        odd = changed(video, **{name: value})
        check(video, odd, "video_metadata", name)
        check(changed(video, file_hash=None), changed(odd, file_hash=None), "unknown")


def test_times_of_a_varying_rate(video):
    stamps = video.media[0].frame_timestamps
    real = changed(video, frame_timestamps=tuple(1.3 * t for t in stamps))
    check(video, real, "video_metadata", "rollout's are frame_indices / fps")
    first = check(real, video, "video_metadata", "train's are frame_indices / fps").first
    assert first.frames.by == "frame_timestamps"
    rounded = changed(video, frame_timestamps=tuple(round(t, 1) for t in stamps))
    assert "video_metadata" not in mp.compare([video], [rounded]).causes


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
    right = changed(video)
    right.processor["video"]["sampling"][name] = value
    first = check(video, right, cause, f"processor.video.sampling.{name}").first
    assert first.field == "processor"


def test_another_policy_of_equal_frames_names_no_other_frames(video):
    """Sizes follow from a policy as well: where only they differ, they are what it did."""
    t, h, w = video.media[0].grid_thw
    right = changed(video, grid_thw=(t, h + 2, w))
    right.processor["video"]["sampling"]["policy"] = "another"
    found = mp.compare([video], [right]).causes
    assert "video_budget" in found and "frame_sampling" not in found
    right.media[0].frame_indices = video.media[0].frame_indices + 1
    assert "frame_sampling" in mp.compare([video], [right]).causes


@given(st.floats(-1e7, 1e7))
def test_clock(seconds):
    shown = clock(seconds)
    assert re.fullmatch(r"-?\d+:[0-5]\d\.\d{3}", shown)
    assert seconds_of(shown) == pytest.approx(seconds, abs=5.1e-4)
    edges = [clock(s) for s in (0, 59.9994, 59.9996, 3600, -0.0001)]
    assert edges == ["0:00.000", "0:59.999", "1:00.000", "60:00.000", "0:00.000"]


# ---- a clip in an episode: sizes, rates, positions -------------------------------------------------


def clip(grid=(3, 4, 4), **fields):
    sample = episode(video=grid)
    for name, value in fields.items():
        setattr(sample.media[0], name, value)
    return finish(sample)


INDICES = np.arange(6) * 5
ASSUMED = {"fps": None, "frame_timestamps": tuple((INDICES / 24).tolist())}


def test_frames_and_rates_of_a_clip():
    check(clip(), clip(frame_indices=INDICES + 1), "frame_sampling")
    unrecorded = clip(grid=(4, 4, 4), frame_indices=None)
    check(clip(), unrecorded, "unknown", "possible: frame_sampling")
    right = clip(**ASSUMED)
    check(clip(), right, "fps_missing")
    right.media[0].fps = 24.0
    check(clip(), right, "fps_missing")
    right.media[0].frame_timestamps = tuple((INDICES / 30).tolist())
    check(clip(), right, "video_metadata")  # of one file
    right.media[0].file_hash = None
    check(clip(), right, "unknown")
    for fps in (29.97, 30000 / 1001):
        check(clip(fps=fps), clip(fps=30.0), "video_metadata")
    check(clip(fps=30000 / 1001), clip(fps=29.97))
    check(clip(fps=30000 / 1001, file_hash=None), clip(fps=29.98), "unknown")


@pytest.mark.parametrize(
    "fields",
    [
        {"total_frames": 99},
        {"decoded_size": (9, 9)},
        {"file_hash": "e" * 64},
        {"media_id": "video"},
    ],
)
@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("frame_sampling", {"frame_indices": INDICES + 1}),
        ("video_budget", {"grid": (3, 8, 6)}),
        ("fps_missing", ASSUMED),
    ],
)
def test_another_video_is_unknown(cause, change, fields):
    check(clip(), clip(**change), cause)
    if "file_hash" not in fields:  # which says that it is one video
        found = mp.compare([clip()], [clip(**change, **fields)]).causes
        assert cause in found or "media_id" in fields
        fields = fields | {"file_hash": None}
    check(clip(), clip(**change, **fields), "unknown", "another video", f"possible: {cause}")


def test_frames_resized_before_the_processor():
    def handed_frames(size, grid=(3, 4, 4), **fields):
        return clip(grid, size=size, content_hash="0" * 64, cache_key="1" * 64, **fields)

    left = clip(grid=(3, 8, 6))
    for grid in ((3, 4, 4), (3, 8, 6)):
        check(left, handed_frames((320, 240), grid), "resize_twice")
    check(left, handed_frames((480, 480)), "unknown", "possible: resize_twice")  # or cut
    check(left, clip(size=None), "unknown", "possible: video_budget, resize_twice")
    limited = handed_frames((320, 240))
    limited.processor = settings(video={"max_pixels": 2 * 602112})
    check(left, limited, "max_pixels unknown")
    for sample in (left, limited):
        sample.processor["video"]["sampling"] = {"policy": "qwen_vl_utils"}
        sample.media[0].decoded_size = (1280, 960)  # the loader resized both, by their limits
    check(left, limited, "max_pixels")


@pytest.mark.parametrize("seconds", [1.5, 0.4, 4.0])
def test_half_of_the_seconds(seconds):
    left = clip((4, 8, 8), second_per_grid_ts=seconds)
    for passed in (seconds / 2, seconds * 2):
        right = finish(other(left), second_per_grid_ts=[passed])
        said = f"train {passed * 2:g}"
        assert said in check(left, right, "second_per_grid_ts").first.evidence


@pytest.mark.parametrize("kind", ["video", "medium"])
@pytest.mark.parametrize(("more", "behind"), [(1, 0), (-1, 1)])
def test_a_position_more_behind_each(kind, more, behind):
    left = clip((4, 8, 8))
    right = other(left)
    right.position_ids = left.position_ids.copy()
    for span in left.modality_spans:
        if kind in (span.modality, "medium"):
            right.position_ids[:, span.stop + behind :] += more
    report = check(left, right, "position_rule")
    said = f"train follows `grid` with {more:+d} behind each {kind}"
    assert report.first.evidence.endswith(said)
    right.position_ids[:, -1] += 1  # no rule counts so
    check(left, right, "unknown", "positions fit no known rule in train")


def test_rules_and_seconds_of_positions():
    check(clip(), clip(second_per_grid_ts=1.0), "second_per_grid_ts")
    left = clip(second_per_grid_ts=1.6)
    check(left, finish(other(left), second_per_grid_ts=None), "second_per_grid_ts")
    code_default = finish(other(left), tokens_per_second=4.0)
    check(left, code_default, "second_per_grid_ts", "rollout 3.2, train 6.4")
    # 1.6 cut to 1 is what a train side without the seconds has, too
    both = finish(other(left), rule="grid_int")
    check(left, both, "second_per_grid_ts", "position_rule is possible too: positions differ from")
    left = clip(second_per_grid_ts=3.5)
    first = check(left, finish(other(left), rule="grid_int"), "position_rule").first
    said = f"positions differ from token {first.index} on: rollout follows `grid`, train follows"
    assert first.evidence == f"{said} `grid_int`"
    left = clip(second_per_grid_ts=3.0)
    padded = finish(other(left), rule="max")
    check(left, padded, "position_rule")
    padded.position_ids, padded.metadata["padding"] = padded.position_ids + 4, [4, 0]
    check(left, padded, "position_rule padding_positions")
    unpassed = finish(other(left), rule="max", second_per_grid_ts=None)
    check(left, unpassed, "position_rule second_per_grid_ts")


# ---- in the text, frame by frame -------------------------------------------------------------------

START, END, VIDEO = 151652, 151653, 151656


def framed(stamps, fps=25.0, indices=(0, 1, 25, 26), system=(11, 12, 13)):
    """A prompt with a video, one span per temporal patch, each after its timestamp's ids; then a response."""
    ids, spans = list(system), []
    for frame, stamp in enumerate(stamps):
        ids += [*stamp, START]
        spans.append(ModalitySpan(len(ids), len(ids) + 4, "video", 0, frame))
        ids += [VIDEO] * 4 + [END]
    ids += [21, 22]
    response = LossSpan(len(ids), len(ids) + 3)
    ids += [31, 32, 33]
    medium = make_medium("clip", (len(stamps), 4, 4), "video", fps=fps)
    medium.frame_indices = np.array(indices)
    medium.frame_timestamps = tuple(i / (fps or 24) for i in indices)
    sample = mp.Sample("s0", "g0", "qwen3_vl", np.array(ids), [medium], spans, [response])
    sample.processor = {"chat_template": "sha256:" + "1" * 64, "video": {"max_pixels": 1}}
    grids = [medium.grid_thw]
    sample.position_ids, _ = mp.mrope_positions(ids, "qwen3_vl", video_grid_thw=grids)
    return sample


STAMPS = ([27, 15, 29], [27, 16, 29])
ASSUMED_STAMPS = ([27, 15, 29], [27, 17, 29])


def without_positions(*samples):
    for sample in samples:
        sample.position_ids = None
    return samples


@pytest.mark.parametrize(
    "stamps",
    [
        ASSUMED_STAMPS,  # the second
        ([27, 18, 29], [27, 16, 29]),  # the first
        ([27, 18, 18, 29], [27, 17, 29]),  # both, one longer
    ],
)
def test_a_missing_fps_moves_the_timestamps(stamps):
    report = check(framed(STAMPS), framed(stamps, fps=None), "fps_missing")
    assert any(f.field == "input_ids" for f in report.findings)


def test_other_frames_other_videos_and_the_template_beside_them():
    more = framed((*STAMPS, [27, 19, 29]), indices=(0, 1, 25, 26, 50, 51))
    check(framed(STAMPS), more, "frame_sampling")
    right = framed(ASSUMED_STAMPS, fps=None, system=range(40, 80))
    right.processor["chat_template"] = "sha256:" + "2" * 64
    assert set(mp.compare([framed(STAMPS)], [right]).causes) == {"fps_missing", "chat_template"}
    left, right = framed(STAMPS), framed(([27, 18, 29], [27, 17, 29]), fps=None)
    left.media[0].total_frames, right.media[0].total_frames = 100, 90
    report = check(left, right, "unknown", "another video")
    assert "text outside" not in str(report.lines())


def written(*seconds):
    """<k.j seconds>, as Qwen's tokenizer writes it."""
    return [[27, 15 + int(s), 13, 15 + round(s * 10) % 10, 6486, 29] for s in seconds]


def halves(*seconds, **keywords):
    """Frames at 0.0, 0.5, 1.0, 1.5, whose times are written as `seconds`."""
    return framed(written(*seconds), fps=2.0, indices=(0, 1, 2, 3), **keywords)


WORDS = {i: chr(33 + i) for i in range(94)}
WORDS |= {6486: " seconds", START: "<|vision_start|>", END: "<|vision_end|>"}


@pytest.mark.parametrize(
    ("seconds", "place", "shown", "count"),
    [
        ((0.3, 1.2), 0, "0.2 s in rollout, 0.3 s in train", 1),  # rounded up
        ((0.2, 1.3), 1, "1.2 s in rollout, 1.3 s in train", 1),
        ((0.0, 1.0), 0, "0.2 s in rollout, 0.0 s in train", 2),  # the first frame's
    ],
)
@pytest.mark.parametrize("decode", [None, lambda ids: "".join(WORDS[i] for i in ids)])
def test_equal_frames_with_other_written_seconds(seconds, place, shown, count, decode):
    said = f"temporal patch {place} of media[0]", shown, f"{count} of 2 patches differ"
    check(halves(0.2, 1.2), halves(*seconds), "timestamp_rounding", *said, decode=decode)


def test_a_tokenizer_reads_what_no_digits_are():
    """Of ids that are not one sign each only the text gives the seconds."""
    words = WORDS | {900: "<0.2", 901: "<0.3", 902: "<1.2"}
    stamps = ([[k, 6486, 29], [902, 6486, 29]] for k in (900, 901))
    left, right = (framed(s, fps=2.0, indices=(0, 1, 2, 3)) for s in stamps)
    check(left, right, "timestamp_rounding", decode=lambda ids: "".join(words[i] for i in ids))
    check(left, right, "unknown")


@pytest.mark.parametrize(
    ("seconds", "lost", "cause"),
    [
        ((0.2, 1.3), ("frame_indices",), "timestamp_rounding"),
        ((0.2, 1.3), ("fps",), "timestamp_rounding"),
        ((0.2, 1.3), ("frame_timestamps",), "timestamp_rounding"),
        ((0.2, 1.3), ("fps", "frame_timestamps"), "unknown"),
        ((0.2, 1.3), ("frame_indices", "frame_timestamps"), "unknown"),
        ((0.2, 2.0), (), "unknown"),  # no frame of the patch is there
    ],
)
def test_which_times_say_that_only_the_text_differs(seconds, lost, cause):
    right = changed(halves(*seconds), **dict.fromkeys(lost))
    said = "possible: timestamp_rounding, fps_missing, frame_sampling"
    check(halves(0.2, 1.2), right, cause, *([said] if cause == "unknown" else []))


def fenced(sample, *, opened=True, closed=True):
    """Vision start and end around all of the video; `sample`'s spans moved along."""
    first, last = sample.modality_spans[0].start - 7, sample.modality_spans[-1].stop + 1
    ids = sample.input_ids.tolist()
    whole = ids[:first] + [START] * opened + ids[first:last] + [END] * closed + ids[last:]
    sample.input_ids = np.array(whole)
    for span in sample.modality_spans:
        span.start, span.stop = span.start + opened, span.stop + opened
    for span in sample.loss_spans:
        span.start, span.stop = span.start + opened + closed, span.stop + opened + closed
    return without_positions(sample)[0]


def test_markers_around_a_video():
    left, (right,) = fenced(halves(0.2, 1.2)), without_positions(halves(0.2, 1.2))
    said = "only {} has vision start and end around all of media[0]"
    assert check(left, right, "video_markers", said.format("rollout")).first.field == "input_ids"
    check(right, left, "video_markers", said.format("train"))
    for kept in ({"closed": False}, {"opened": False}):  # half a pair is other text
        half = fenced(halves(0.2, 1.2), **kept)
        check(half, right, "unknown", "text outside the loss spans differs")
    (both,) = without_positions(halves(0.3, 1.2, system=range(40, 80)))
    both.processor["chat_template"] = "sha256:" + "2" * 64
    found = {"chat_template", "timestamp_rounding", "video_markers"}
    assert set(mp.compare([left], [both]).causes) == found
    cut = fenced(halves(0.2, 1.2))  # a video that was cut off lacks no markers
    stop = cut.modality_spans[-1].start + 1
    cut.input_ids, cut.loss_spans = cut.input_ids[:stop], []
    cut.modality_spans[-1].stop = stop
    check(left, cut, "truncated truncated_medium")
    left, right = halves(0.2, 1.2), halves(0.2, 1.2)  # of equal ids a setting tells
    left.processor["video_markers"], right.processor["video_markers"] = "kept", "replaced"
    assert check(left, right, "video_markers").first.field == "processor"


def test_text_between_two_occurrences_of_one_video_is_text():
    def twice(word):
        one, two = framed(STAMPS), framed(STAMPS)
        shift = len(one) + 1
        for span in [*two.modality_spans, *two.loss_spans]:
            span.start, span.stop = span.start + shift, span.stop + shift
        one.input_ids = np.concatenate([one.input_ids, [word], two.input_ids])
        one.modality_spans += two.modality_spans
        one.loss_spans += two.loss_spans
        return without_positions(one)[0]

    said = "text outside the loss spans differs"
    (finding,) = check(twice(50), twice(51), "unknown", said).findings
    assert (finding.field, finding.index) == ("input_ids", len(framed(STAMPS)))
    other_pixels = changed(halves(0.3, 1.3), content_hash="0" * 64)
    report = mp.compare([halves(0.2, 1.2)], [other_pixels])
    assert set(report.causes) == {"timestamp_rounding", "frame_pixels"}
