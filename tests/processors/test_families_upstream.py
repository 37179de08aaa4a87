"""Clips of Kimi K2.5 and MiniCPM-V 4.6, whose processors need torchvision; pictures: the conformance check `layout`."""

import numpy as np
import pytest
import torch
from support.kits import get_kit

import mmpack as mp
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium

pytestmark = pytest.mark.upstream
NAMES = ("kimi_k25", "minicpmv4_6")


@pytest.fixture(scope="module", params=NAMES)
def kit(request):
    kit = get_kit(request.param)
    if not kit.available:
        pytest.skip(f"this transformers has no {request.param}")
    return kit


@pytest.fixture(scope="module")
def hf_processor(kit):
    pytest.importorskip("torchvision")
    return kit.processor()


def bare(messages):
    """Without the media themselves."""
    kept = [
        {k: v for k, v in part.items() if k in ("type", "text")} for part in messages[0]["content"]
    ]
    return [{"role": "user", "content": kept}]


def test_clips(kit, hf_processor):
    """A clip as its own processor made it; frames of one view each."""
    if kit.family == "minicpmv4_6":
        hf_processor.video_processor.slice_mode = hf_processor.video_slice_mode = False
    frames = np.random.default_rng(1).integers(0, 255, (6, 60, 90, 3), dtype=np.uint8)
    about = {"fps": 12.5, "total_num_frames": 100, "frames_indices": [3, 10, 19, 40, 77, 99]}
    about |= {"duration": 8.0}
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Why?"}]}]
    text = hf_processor.apply_chat_template(bare(messages), add_generation_prompt=True)
    out = hf_processor(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[about],
        do_sample_frames=False,
        return_tensors="pt",
    )
    pixels = out["pixel_values_videos"]
    if kit.family == "minicpmv4_6":
        side = kit.about.patch_size
        grid = (6, *out["target_sizes_videos"][0].tolist())
        pixels = pixels[0].view(3, side, -1, side).permute(2, 0, 1, 3)
    else:
        grid = (6, *out["video_grid_thw"][0, 1:].tolist())
    medium = Medium(
        media_id="clip",
        modality="video",
        cache_key=cache_key("0" * 64, grid, {}),
        grid_thw=grid,
        num_tokens=kit.about.vision_tokens(grid),
        content_hash="0" * 64,
        frame_indices=np.asarray(about["frames_indices"]),
        fps=about["fps"],
    )
    medium.pixel_values = pixels.reshape(kit.about.pixel_shape(grid)).numpy()
    wrapped = mp.wrap_processor(hf_processor)
    sample = wrapped(messages, media=[medium], sample_id="a")
    assert sample.input_ids.tolist() == out["input_ids"][0].tolist()
    assert mp.validate([sample]) == []
    ids = hf_processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    again = wrapped.from_ids(ids, [medium], expanded=False, sample_id="b")
    assert again.input_ids.tolist() == sample.input_ids.tolist()
