"""Whole samples with videos against transformers' real processors, which sample, resize and lay out by themselves.

Runs where torchvision is (.venv-upstream); frames come from PyAV straight, qwen-vl-utils reads by a stand-in of decord.
"""

import io
import sys
import types

import numpy as np
import pytest
import torch

import mmpack as mp
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.processors.frame_processor import FrameProcessor
from mmpack.processors.settings import vision_settings

pytestmark = pytest.mark.upstream

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PIXELS = {"min_pixels": 4 * 32 * 32, "max_pixels": 300 * 28 * 28}


def clip_of(frames, fps, size, seed=0):
    """H.264 of blurred noise, [n, h, w, 3] as PyAV decodes it, and its bytes."""
    import av

    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for _ in range(frames):
            coarse = rng.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
            pixels = coarse.repeat(8, axis=0).repeat(8, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    with av.open(io.BytesIO(out.getvalue())) as container:
        decoded = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
    return out.getvalue(), decoded


CLIPS = {"wide": (37, 25, (320, 176)), "odd": (11, 3, (64, 64)), "small": (16, 12, (48, 32))}


@pytest.fixture(scope="module")
def clips():
    return {name: clip_of(*about) for name, about in CLIPS.items()}


@pytest.fixture(scope="module")
def qwen_tok():
    from mmpack.demo.vocabulary import qwen_tokenizer

    return qwen_tokenizer()


@pytest.fixture
def make(qwen_tok):
    return lambda family: qwen_vl_processor(family, tokenizer=qwen_tok, **PIXELS)


def messages(*videos):
    parts = [{"type": "video", "video": v} for v in videos]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "In which order?"}]}]


def by_hf(hf, frames, about, **options):
    """The processor's own call: it samples by `options`."""
    text = hf.apply_chat_template(messages("x"), tokenize=False, add_generation_prompt=True)
    return hf(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[about],
        return_tensors="pt",
        cap_pixels_per_frame=False,
        **options,
    )


def check(sample, made, family):
    [medium] = sample.media
    assert sample.input_ids.tolist() == made["input_ids"][0].tolist()
    assert medium.grid_thw == tuple(made["video_grid_thw"][0].tolist())
    assert np.array_equal(medium.pixel_values, made["pixel_values_videos"].numpy())
    if family == "qwen2_5_vl":
        assert medium.second_per_grid_ts == pytest.approx(
            float(made["second_per_grid_ts"][0]), rel=1e-7
        )
    counted = {"video_grid_thw": made["video_grid_thw"].tolist()}
    if family == "qwen2_5_vl":
        counted["second_per_grid_ts"] = [float(made["second_per_grid_ts"][0])]
    wanted, _ = mp.mrope_positions(sample.input_ids, family, **counted)
    assert np.array_equal(sample.position_ids, wanted)
    assert mp.validate(sample) == []


@pytest.mark.parametrize("own", [False, True], ids=["their pixels", "our pixels"])
@pytest.mark.parametrize("name", ["wide", "odd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_what_transformers_makes(make, clips, family, name, own):
    hf, (data, frames) = make(family), clips[name]
    count, fps, _ = CLIPS[name]
    about = {"total_num_frames": count, "fps": fps, "duration": count / fps}
    made = by_hf(hf, frames, about, fps=2, do_sample_frames=True)
    parts = (
        {"video_processor": FrameProcessor(family, **hf.video_processor.to_dict())} if own else {}
    )
    processor = mp.wrap_processor(hf, video_settings={"fps": 2.0}, **parts)
    sample = processor(messages(data), sample_id="s")
    check(sample, made, family)
    assert sample.media[0].total_frames == count and sample.media[0].fps == fps


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_that_were_sampled_already(make, clips, family):
    """As an engine has them: some frames, and of which video."""
    hf, (_, frames) = make(family), clips["wide"]
    chosen = np.array([0, 9, 18, 27, 36])
    about = {"fps": 25.0, "frames_indices": chosen, "total_num_frames": 37}
    listed = about | {"frames_indices": chosen.tolist()}
    made = by_hf(hf, frames[chosen], listed, do_sample_frames=False)
    check(mp.wrap_processor(hf)(messages((frames[chosen], about)), sample_id="s"), made, family)


class StandIn:
    """decord's VideoReader over frames in memory."""

    def __init__(self, path):
        self.frames, self.fps = self.clips[path]

    def __len__(self):
        return len(self.frames)

    def get_avg_fps(self):
        return self.fps

    def get_batch(self, indices):
        return types.SimpleNamespace(asnumpy=lambda: self.frames[indices])


@pytest.fixture
def by_utils(clips, monkeypatch):
    """Call a processor of a family with what qwen-vl-utils makes of a clip; returns its frames and metadata too.

    Resized twice, in float32 the second time; Qwen3-VL's model card switches the second one off.
    """
    monkeypatch.setitem(sys.modules, "decord", types.SimpleNamespace(VideoReader=StandIn))
    from qwen_vl_utils import vision_process

    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "decord")

    def call(hf, family, name, **cut):
        StandIn.clips = {"clip.mp4": (clips[name][1], float(CLIPS[name][1]))}
        asked = messages("clip.mp4")
        asked[0]["content"][0].update(cut)
        cards3 = family == "qwen3_vl"
        _, [(video, about)], options = vision_process.process_vision_info(
            asked,
            return_video_kwargs=True,
            return_video_metadata=True,
            image_patch_size=16 if cards3 else 14,
        )
        about["frames_indices"] = [int(i) for i in about["frames_indices"]]
        made = hf(
            text=[
                hf.apply_chat_template(messages("x"), tokenize=False, add_generation_prompt=True)
            ],
            videos=[video],
            video_metadata=[dict(about)],
            do_resize=not cards3,
            cap_pixels_per_frame=False,
            return_tensors="pt",
            **options,
        )
        return made, video, about

    return call


@pytest.mark.parametrize("own", [False, True], ids=["their pixels", "our pixels"])
@pytest.mark.parametrize("name", ["wide", "small"])
@pytest.mark.parametrize("family", FAMILIES)
def test_qwen_vl_utils_and_the_processor(make, clips, by_utils, family, name, own):
    hf = make(family)
    made, *_ = by_utils(hf, family, name)
    parts = (
        {"video_processor": FrameProcessor(family, **hf.video_processor.to_dict())} if own else {}
    )
    processor = mp.wrap_processor(hf, video_policy="qwen_vl_utils", **parts)
    check(processor(messages(clips[name][0]), sample_id="s"), made, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_of_qwen_vl_utils_has_the_files_count(make, clips, by_utils, family):
    """It tells the processor how many frames the cut leaves: seconds follow from these, the record has the file's."""
    hf, (data, frames) = make(family), clips["wide"]
    fps = float(CLIPS["wide"][1])
    cut = {"video_start": len(frames) / fps / 2, "video_end": len(frames) / fps}
    made, video, about = by_utils(hf, family, "wide", **cut)
    assert about["total_num_frames"] < max(about["frames_indices"])
    processor = mp.wrap_processor(hf, video_policy="qwen_vl_utils", video_settings=cut)
    whole = about | {"total_num_frames": len(frames)}
    handed = video.byte()
    for item in (data, (handed, whole)):
        sample = processor(messages(item), sample_id="s")
        check(sample, made, family)
        assert sample.media[0].total_frames == len(frames)
        assert sample.media[0].frame_indices.tolist() == about["frames_indices"]
    with pytest.raises(mp.ArgumentError, match="the file's total_num_frames, with the cut's"):
        processor(messages((handed, about)), sample_id="s")


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_do_not_tell_who_lays_out(make, family):
    """So that parity of two environments finds nothing; and what is released is what transformers' class says."""
    hf = make(family)
    own = FrameProcessor(family, **hf.video_processor.to_dict())
    assert vision_settings(own) == vision_settings(hf.video_processor)
    one, other = (mp.wrap_processor(hf, video_processor=p) for p in (own, hf.video_processor))
    assert one.fingerprint == other.fingerprint
    released = qwen_vl_processor(family, tokenizer=hf.tokenizer).image_processor.to_dict()
    kept = ("image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size")
    mine = FrameProcessor(family).to_dict()
    for name in kept:
        assert np.array_equal(mine[name], released[name])
    for name, value in mine.items():
        if name not in ("size", *kept):
            assert getattr(type(hf.video_processor), name, None) == value, name


def test_a_plan_of_other_settings_has_its_sizes(make, clips):
    """The rollout's plan, not the trainer's processor, says how large the frames are."""
    hf, (data, frames) = make("qwen2_5_vl"), clips["wide"]
    plan = mp.video.sample(
        data, policy="vllm", model="qwen2_5_vl", max_pixels=50 * 28 * 28, min_pixels=4 * 28 * 28
    )
    [medium] = mp.wrap_processor(hf)(messages((data, plan)), sample_id="s").media
    made = hf.video_processor(
        videos=[torch.from_numpy(frames[list(plan.indices)]).permute(0, 3, 1, 2)],
        size={"shortest_edge": 4 * 28 * 28, "longest_edge": 50 * 28 * 28},
        do_sample_frames=False,
        cap_pixels_per_frame=False,
        return_tensors="pt",
    )
    assert medium.grid_thw == plan.grid_thw == tuple(made["video_grid_thw"][0].tolist())
    assert np.array_equal(medium.pixel_values, made["pixel_values_videos"].numpy())
    assert medium.metadata["sampling"] == plan.processor_settings()
