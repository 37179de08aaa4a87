"""Kimi K2.5 and MiniCPM-V 4.6, whose processors need torchvision: equal ids and pixels, wrapped and by themselves."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.kits import get_kit

import mmpack as mp
from mmpack.adapters.transformers.tower import _tower_arguments
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium

pytestmark = pytest.mark.upstream
NAMES = ("kimi_k25", "minicpmv4_6")
PIXELS = {"kimi_k25": "image_grid_thw", "minicpmv4_6": "target_sizes"}


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
    return [
        {
            **m,
            "content": m["content"]
            if isinstance(m["content"], str)
            else [{k: v for k, v in p.items() if k in ("type", "text")} for p in m["content"]],
        }
        for m in messages
    ]


def test_pictures(kit, hf_processor):
    """Random sizes, one to three pictures, with and without text between."""
    rng = np.random.default_rng(0)
    wrapped = mp.wrap_processor(hf_processor)
    for case in range(12):
        sizes = rng.integers(30, 300, (int(rng.integers(1, 4)), 2)).tolist()
        images = [Image.fromarray(rng.integers(0, 255, (*s, 3), dtype=np.uint8)) for s in sizes]
        parts = [{"type": "image", "image": image} for image in images]
        parts.insert(int(rng.integers(0, len(parts) + 1)), {"type": "text", "text": "What is it?"})
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": parts},
        ]
        sample = wrapped(messages, response_ids=[11, 12], sample_id=str(case))
        text = hf_processor.apply_chat_template(bare(messages), add_generation_prompt=True)
        out = hf_processor(text=[text], images=images, return_tensors="pt")
        assert sample.input_ids[:-2].tolist() == out["input_ids"][0].tolist(), sizes
        held = torch.cat([torch.as_tensor(m.pixel_values) for m in sample.media])
        made = _tower_arguments(kit.about, "image", held, [m.grid_thw for m in sample.media])
        for name in ("pixel_values", PIXELS[kit.family]):
            assert torch.equal(made[name], out[name]), (name, sizes)
        assert mp.validate([sample]) == []
        again = wrapped.from_ids(
            hf_processor.tokenizer(text, add_special_tokens=False)["input_ids"],
            images,
            expanded=False,
            sample_id=str(case),
        )
        assert again.input_ids.tolist() == out["input_ids"][0].tolist()


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
    sample = mp.wrap_processor(hf_processor)(messages, media=[medium], sample_id="a")
    assert sample.input_ids.tolist() == out["input_ids"][0].tolist()
    assert mp.validate([sample]) == []
    wrapped = mp.wrap_processor(hf_processor)
    ids = hf_processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    again = wrapped.from_ids(ids, [medium], expanded=False, sample_id="b")
    assert again.input_ids.tolist() == sample.input_ids.tolist()
    report = mp.compare([sample], [sample])
    assert report.ok
