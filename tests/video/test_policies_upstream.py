"""Policies against qwen-vl-utils and transformers as installed here, and what a plan makes of their processors."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support.video_infos import clip

from mmpack.errors import ArgumentError
from mmpack.video import sample
from mmpack.video.hand_over import hf_kwargs, hf_metadata

pytestmark = pytest.mark.upstream
ORACLES = Path(__file__).resolve().parents[2] / "fixtures" / "video"


@pytest.fixture(scope="module")
def upstream():
    sys.path.insert(0, str(ORACLES))
    import upstream

    yield upstream
    sys.path.remove(str(ORACLES))


@pytest.mark.parametrize(
    ("policy", "oracle"),
    [
        ("qwen_vl_utils", "qwen_vl_utils"),
        ("transformers_qwen2_vl", "transformers_video"),
        ("transformers_qwen3_vl", "transformers_video"),
    ],
)
def test_fresh_cases(upstream, policy, oracle):
    """Cases that are in no table."""
    from answers import Video, answer
    from cases import KNOWN, cases
    from test_policies import differences

    fresh = [c for c in cases(policy, 60, "fresh") if c[0] not in KNOWN and c[0][2] < 1000]
    wrong = []
    for video, settings in fresh:
        row = {"video": video, "settings": settings}
        row["upstream"] = answer(getattr(upstream, oracle), Video(*video), settings)
        wrong += [(row, d)] if (d := differences(policy, row)) else []
    assert not wrong, wrong[:3]
    assert len(fresh) > 30


PLANS = [
    ("qwen_vl_utils", {}),
    ("qwen_vl_utils", {"video_start": 1.0, "video_end": 3.0}),
    ("qwen_vl_utils", {"model": "qwen3_vl"}),
    ("qwen_vl_utils", {"model": "qwen3_vl", "image_patch_size": 14, "do_resize": True}),
    ("transformers_qwen2_vl", {"num_frames": 6, "min_pixels": 100_352, "max_pixels": 200_704}),
    ("transformers_qwen3_vl", {}),
    ("vllm", {"loader": "opencv", "num_frames": 7}),
    ("vllm", {"model": "qwen3_vl"}),
]


@pytest.mark.parametrize("fps", [25.0, None])
@pytest.mark.parametrize(("policy", "given"), PLANS)
def test_processors_keep_the_plan(policy, given, fps):
    """Real frames through the real processor, with the plan's metadata: grid, seconds and timestamps are the plan's."""
    import re

    import torch
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    from mmpack.demo.qwen_processor import qwen_vl_processor

    try:
        plan = sample(clip(113, fps, 160, 120), policy=policy, **given)
    except ArgumentError:
        assert fps is None
        return
    model = plan.settings["model"]
    hf = qwen_vl_processor(model)
    kind = Qwen3VLVideoProcessor if model == "qwen3_vl" else Qwen2VLVideoProcessor
    hf.video_processor = kind(cap_pixels_per_frame=False)
    width, height = plan.loaded_size
    frames = torch.zeros(plan.num_frames, 3, height, width, dtype=torch.uint8)
    out, text = hf._process_videos(
        [frames],
        video_metadata=[VideoMetadata(**hf_metadata(plan))],
        return_metadata=True,
        return_tensors="pt",
        **hf_kwargs(plan),
    )
    assert tuple(out["video_grid_thw"][0].tolist()) == plan.grid_thw
    if plan.second_per_grid_ts is None:
        written = re.findall(r"<([\d.]+) seconds>", text[0])
        assert written == [f"{t:.1f}" for t in plan.patch_timestamps]
    else:
        # vLLM's plan has the float32 that its model gets
        assert np.float32(out["second_per_grid_ts"][0]) == np.float32(plan.second_per_grid_ts)


def test_the_pixels_of_fetch_video(upstream):
    """Only the size decides the resize: torchvision's, to `loaded_size`, is what fetch_video returns."""
    import torch
    from qwen_vl_utils import vision_process
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    torch.manual_seed(0)
    video = torch.randint(0, 256, (30, 3, 90, 130), dtype=torch.uint8)
    plan = sample(clip(30, 10.0, 130, 90), policy="qwen_vl_utils")

    def read(ele):
        count = vision_process.smart_nframes(ele, total_frames=30, video_fps=10.0)
        chosen = torch.linspace(0, 29, count).round().long()
        return video[chosen], {}, count / 30 * 10.0

    kept = dict(vision_process.VIDEO_READER_BACKENDS)
    vision_process.VIDEO_READER_BACKENDS.update(dict.fromkeys(kept, read))
    try:
        theirs = vision_process.fetch_video({"video": "clip.mp4"})
    finally:
        vision_process.VIDEO_READER_BACKENDS.update(kept)
    width, height = plan.loaded_size
    mine = resize(
        video[list(plan.indices)], [height, width], InterpolationMode.BICUBIC, antialias=True
    )
    assert torch.equal(theirs, mine.float())
