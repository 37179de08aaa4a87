"""Policies against qwen-vl-utils and transformers as installed here."""

import sys
from pathlib import Path

import pytest
from support.video_infos import clip

from mmpack.video import sample

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
