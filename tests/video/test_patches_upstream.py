"""Patches and shortened clips against transformers' real video processors and `get_rope_index`."""

import numpy as np
import pytest
import torch
import transformers
from transformers.video_utils import VideoMetadata

import mmpack as mp
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.families import get_family
from mmpack.video import drop_frames, mask_frames

pytestmark = pytest.mark.upstream
PROCESSORS = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}
MODELS = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
FPS, TOTAL = 25.0, 500


@pytest.fixture(scope="module")
def real():
    from mmpack.demo.vocabulary import qwen_tokenizer

    tokenizer = qwen_tokenizer()

    def make(name):
        hf = qwen_vl_processor(name, tokenizer=tokenizer, max_pixels=64 * 32 * 32)
        unit = get_family(name).patch_size * 2
        size = {"shortest_edge": 4 * unit**2, "longest_edge": 64 * unit**2}
        kind = getattr(transformers, PROCESSORS[name])
        hf.video_processor = kind(size=size, cap_pixels_per_frame=False, do_resize=False)
        return hf

    return make


def by_hf(hf, frames, indices):
    """Ids, rows, grid and seconds of a prompt with the clip, by the processor's own call."""
    parts = [{"type": "video"}, {"type": "text", "text": "What comes first?"}]
    text = hf.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    metadata = VideoMetadata(total_num_frames=TOTAL, fps=FPS, frames_indices=indices.tolist())
    channels_first = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return hf(
        text=[text], videos=[channels_first], video_metadata=[metadata], do_sample_frames=False
    )


def rope_index(name, ids, made):
    """transformers' positions; no weights are needed."""
    cls = getattr(transformers, MODELS[name] + "Model")
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.config = getattr(transformers, MODELS[name] + "Config")()
    more = {}
    if name == "qwen2_5_vl":
        model.config.vision_config.tokens_per_second = 2
        more["second_per_grid_ts"] = torch.tensor(made["second_per_grid_ts"])
    rows = torch.tensor([ids])
    positions, _ = model.get_rope_index(
        rows,
        mm_token_type_ids=2 * (rows == get_family(name).video_token_id).int(),
        image_grid_thw=None,
        video_grid_thw=torch.as_tensor(made["video_grid_thw"]),
        **more,
    )
    return positions[:, 0].numpy()


def sample_of(processor, name, made, indices):
    grid = tuple(int(n) for n in made["video_grid_thw"][0])
    seconds = made["second_per_grid_ts"] if name == "qwen2_5_vl" else None
    medium = mp.Medium(
        "v",
        "video",
        "ab" * 32,
        grid,
        get_family(name).vision_tokens(grid),
        fps=FPS,
        frame_indices=indices,
        frame_timestamps=tuple((indices / FPS).tolist()),
        second_per_grid_ts=None if seconds is None else float(seconds[0]),
        total_frames=TOTAL,
    )
    medium.pixel_values = np.asarray(made["pixel_values_videos"])
    ids = list(made["input_ids"][0])
    spans = [(len(ids), len(ids) + 2)]
    return processor.from_ids([*ids, 5, 6], [medium], loss_spans=spans, sample_id="s")


@pytest.mark.parametrize("gone", [[0], [1, 2], [0, 1, 3], [2, 4]])
@pytest.mark.parametrize("name", PROCESSORS)
def test_dropped_and_black_frames_are_what_the_processor_makes(real, name, gone):
    hf = real(name)
    processor = mp.wrap_processor(hf)
    unit = get_family(name).patch_size * 2
    rng = np.random.default_rng(1)
    # the last patch is half full
    frames = rng.integers(0, 256, (9, unit, 2 * unit, 3), dtype=np.uint8)
    indices = np.arange(9) * 37 + 3
    sample = sample_of(processor, name, by_hf(hf, frames, indices), indices)
    left = [f for f in range(9) if f // 2 not in gone]
    if len(left) > 1:
        made = by_hf(hf, frames[left], indices[left])
        out = drop_frames(sample, 0, gone, frames=frames)
        ids = [*made["input_ids"][0], 5, 6]
        assert out.input_ids.tolist() == ids
        assert [list(out.media[0].grid_thw)] == np.asarray(made["video_grid_thw"]).tolist()
        assert np.array_equal(out.media[0].pixel_values, np.asarray(made["pixel_values_videos"]))
        if name == "qwen2_5_vl":
            assert out.media[0].second_per_grid_ts == float(made["second_per_grid_ts"][0])
        assert np.array_equal(out.position_ids, rope_index(name, ids, made))
        assert mp.validate(out) == []
    black = frames.copy()
    black[[f for f in range(9) if f // 2 in gone]] = 0
    made = by_hf(hf, black, indices)
    out = mask_frames(sample, 0, gone, frames=frames)
    assert np.array_equal(out.media[0].pixel_values, np.asarray(made["pixel_values_videos"]))
    assert out.input_ids.tolist() == [*made["input_ids"][0], 5, 6]
