"""Qwen3-VL, Qwen3.5 and InternVL: samples against what transformers' own processors make, videos included."""

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from support.replicas.internvl_processor import internvl_processor

import mmpack as mp
from mmpack.adapters.transformers.without_torchvision import WITHOUT_TORCHVISION
from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import get_family
from mmpack.processors.settings import vision_settings
from mmpack.schema.media import Medium
from mmpack.schema.spans import LossSpan
from mmpack.versions import KEPT, REPLACED

pytestmark = pytest.mark.adapter
START, IMAGE, VIDEO, END = 151652, 151655, 151656, 151653


@pytest.fixture(scope="module")
def internvl():
    return internvl_processor(max_tiles=4)


@pytest.fixture
def qwen3(make_hf):
    return make_hf("qwen3_vl", max_pixels=256 * 1024)


def user(*parts):
    content = [
        {"type": "text", "text": p}
        if isinstance(p, str)
        else {"type": "video" if isinstance(p, Medium) else "image"}
        | ({"video": p} if isinstance(p, Medium) else {"image": p})
        for p in parts
    ]
    return [{"role": "user", "content": content}]


def clip(frames=5, grid=(3, 4, 6), key="ab", **fields):
    known = {"fps": 29.97, "frame_indices": np.array([0, 7, 31, 44, 60, 61, 75][:frames])}
    family = get_family("qwen3_vl")
    return Medium("v", "video", key * 32, grid, family.vision_tokens(grid), **(known | fields))


# ---------------------------------------------------------------- images


def test_internvl_settings(internvl, picture):
    one = mp.wrap_processor(internvl)
    image = one.settings["image"]
    assert (image["height"], image["width"]) == (448, 448)
    assert image["crop_to_patches"] and (image["min_patches"], image["max_patches"]) == (1, 4)
    uncut = vision_settings(internvl.image_processor, {"crop_to_patches": False})
    assert uncut["crop_to_patches"] is False and "max_patches" not in uncut
    assert one.settings["position_rule"] == "count"
    more = internvl_processor(max_tiles=6, tokenizer=internvl.tokenizer)
    other = mp.wrap_processor(more)
    assert other.fingerprint != one.fingerprint
    assert one.medium(picture(0)).cache_key != other.medium(picture(0)).cache_key
    with pytest.raises(ArgumentError, match="position_rule 'grid'"):
        mp.wrap_processor(internvl, position_rule="grid")
    internvl.image_token_id = 151671  # InternVL3.5's
    try:
        with pytest.raises(ArgumentError, match="is 151671, expected one of internvl 151667"):
            mp.wrap_processor(internvl)
    finally:
        internvl.image_token_id = 151667


def qwen3_5_tokenizer():
    """Ids of Qwen3.5 around a vocabulary of one token."""
    special = {"<|vision_start|>": 248053, "<|vision_end|>": 248054}
    special |= {"<|image_pad|>": 248056, "<|video_pad|>": 248057, "<|endoftext|>": 248044}
    words = tokenizers.models.WordLevel({"a": 0} | special, unk_token="a")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|endoftext|>")


def test_qwen3_5_is_known_by_its_image_token(qwen3):
    hf = WITHOUT_TORCHVISION["Qwen3VLProcessor"](qwen3.image_processor, qwen3_5_tokenizer())
    assert mp.wrap_processor(hf).family.name == "qwen3_5"
    assert mp.wrap_processor(hf, family="qwen3_5_moe").family.name == "qwen3_5_moe"
    with pytest.raises(ArgumentError, match="is 248056, expected one of qwen3_vl 151655"):
        mp.wrap_processor(hf, family="qwen3_vl")


# ---------------------------------------------------------------- videos as frames in text


class VideoProcessor:
    """Stands for transformers' own, which needs torchvision: says what it made of a video."""

    merge_size, temporal_patch_size = 2, 2
    valid_kwargs = transformers.processing_utils.VideosKwargs
    model_input_names = ("pixel_values_videos",)

    def __init__(self, media):
        self.media = media

    def __call__(self, videos, **kwargs):
        metadata = [
            transformers.video_utils.VideoMetadata(
                total_num_frames=100, fps=m.fps, frames_indices=np.array(m.frame_indices)
            )
            for m in self.media
        ]
        grids = torch.tensor([m.grid_thw for m in self.media])
        return transformers.BatchFeature({"video_grid_thw": grids, "video_metadata": metadata})


def ids_by_hf(hf, text, media):
    """transformers' own expansion of `text`, under the version that is installed."""
    hf.video_processor = VideoProcessor(media)
    frames = [np.zeros((4, 8, 8, 3), np.uint8) for _ in media]
    made = transformers.Qwen3VLProcessor.__call__(hf, text=[text], videos=frames)
    return list(made["input_ids"][0])


@pytest.mark.parametrize(
    "parts",
    [
        ["Look:", clip(), "and.", clip(3, (2, 4, 4), "cd"), "So?"],
        [clip(1, (1, 2, 2)), clip(1, (1, 2, 2))],
    ],
)
def test_videos_equal_the_hf_processor(qwen3, parts):
    messages, processor = user(*parts), mp.wrap_processor(qwen3)
    sample = processor(messages, response_ids=[1, 2], sample_id="s")
    text = qwen3.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    media = [p for p in parts if isinstance(p, Medium)]
    assert sample.input_ids[:-2].tolist() == ids_by_hf(qwen3, text, media)
    frames = [k for m in media for k in range(m.grid_thw[0])]
    assert [s.frame for s in sample.modality_spans] == frames
    assert mp.validate(sample) == []
    again = processor.from_ids(sample.input_ids, media, loss_spans=sample.loss_spans, sample_id="s")
    assert again == sample
    assert len(mp.pack([sample], share_prefix=True).media_order) == len(media)


@pytest.mark.parametrize("markers", [KEPT, REPLACED])
def test_one_id_a_video(qwen3, markers):
    """Unexpanded ids of an engine: seconds are encoded by themselves; a sampled placeholder stays a text token."""
    processor = mp.wrap_processor(qwen3)
    processor.parts.video_markers = markers
    medium = clip()
    runs = []
    for written in ("<0.1 seconds>", "<1.3 seconds>", "<2.0 seconds>"):
        runs += [*qwen3.tokenizer(written)["input_ids"], START, *[VIDEO] * 6, END]
    ids = [5, START, VIDEO, END, 6, 7, VIDEO, 8]
    sample = processor.from_ids(ids, [medium], expanded=False, loss_spans=[(5, 8)], sample_id="s")
    assert sample.processor["video_markers"] == markers
    fence = ([START], [END]) if markers == KEPT else ([], [])
    assert sample.input_ids.tolist() == [5, *fence[0], *runs, *fence[1], 6, 7, VIDEO, 8]
    n = len(sample)
    assert sample.loss_spans == [LossSpan(n - 3, n, turn=0)]
    assert [s.frame for s in sample.modality_spans] == [0, 1, 2]
    bare = processor.from_ids([5, VIDEO, 6], [medium], expanded=False, sample_id="s")
    assert bare.input_ids.tolist() == [5, *runs, 6]
    first = processor.from_ids([5, 6], sample_id="s")
    more = processor.append(
        first, observation_ids=[START, VIDEO, END], media=[medium], expanded=False, response_ids=[9]
    )
    assert more.input_ids.tolist() == [5, 6, *fence[0], *runs, *fence[1], 9]
    last = processor.append(more, observation_ids=[4])
    assert [s.frame for s in last.modality_spans] == [0, 1, 2] and mp.validate(last) == []


@pytest.mark.parametrize(
    ("medium", "error", "message"),
    [
        (clip(fps=None), ArgumentError, "'v' has no times"),
        (clip(2), LayoutError, "2 frames, its grid .* holds 3 patches of 2. Fix.*MM111"),
        (clip(7), LayoutError, "7 frames, its grid .* holds 3 patches of 2. Fix.*MM111"),
    ],
)
def test_times_that_do_not_fit(qwen3, medium, error, message):
    processor = mp.wrap_processor(qwen3)
    with pytest.raises(error, match=message) as caught:
        processor(user(medium), sample_id="s")
    assert "\n" not in str(caught.value)


def test_videos_that_are_not_there(qwen3, internvl):
    processor = mp.wrap_processor(qwen3)
    with pytest.raises(LayoutError, match="MM104"):
        processor(user("a <|video_pad|> in text"), sample_id="s")
    with pytest.raises(LayoutError, match="MM107"):
        processor.from_ids([5, START, *[VIDEO] * 6, END], [clip()], sample_id="s")
    with pytest.raises(LayoutError, match="MM101"):
        whole = [t for _ in range(3) for t in (7, START, *[VIDEO] * 5, END)]
        processor.from_ids(whole, [clip()], sample_id="s")
    with pytest.raises(mp.ArgumentError, match=r"leaves out content\[0\] \(video\)"):
        mp.wrap_processor(internvl)(user(clip()), sample_id="s")
