"""Gemma's processors of transformers beside ours: the same ids, pixels and token types; ids that are not expanded."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.kits import get_kit
from support.video_infos import clip

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.ops.patches.lines import lines_of
from mmpack.packing.media import tiles_of
from mmpack.video.drop import blackened

KITS = [name for name in ("gemma3", "gemma4") if get_kit(name).available]
needs_gemma4 = pytest.mark.skipif("gemma4" not in KITS, reason="Gemma 4 is too old here")
RANDOM = np.random.default_rng(0)
WIDE = Image.fromarray(RANDOM.integers(0, 256, (400, 900, 3), dtype=np.uint8))
TALL = WIDE.resize((200, 600))
FRAMES = RANDOM.integers(0, 256, (3, 120, 200, 3), dtype=np.uint8)
TIMES = {"fps": 2.0, "frames_indices": [0, 60, 250], "total_num_frames": 260}


@pytest.fixture(scope="module", params=KITS)
def theirs(request):
    return get_kit(request.param).processor()


def conversation(family):
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image", "image": WIDE},
        {"type": "text", "text": "\n\nthis"},
        {"type": "image", "image": TALL},
        {"type": "image", "image": WIDE},
    ]
    clip = [{"type": "video", "video": (FRAMES, TIMES)}] if family.video is not None else []
    return [{"role": "user", "content": [*parts, *clip]}]


def made_by(theirs, text, family, **options):
    """What transformers' processor makes of the conversation's text and media."""
    if family.video is not None:
        clip = torch.from_numpy(FRAMES).permute(0, 3, 1, 2)
        options["videos"] = [clip]
        options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [TIMES]}
    images = [[WIDE, TALL, WIDE]]
    return theirs(
        text=[text], images=images, return_tensors="pt", add_special_tokens=False, **options
    )


def pixels_of(media, family, longest):
    """As the family's tower reads them."""
    rows = torch.cat([torch.as_tensor(m.pixel_values) for m in media])
    if family.pixel_layout == "tiles":
        return tiles_of(rows, media[0].grid_thw[1:], family)
    sizes = [m.grid_thw[1:] for m in media for _ in range(m.grid_thw[0])]
    return lines_of(rows, sizes, longest)


def check(theirs, options, media):
    ours = mp.wrap_processor(theirs)
    messages = conversation(ours.family)
    text = ours.render(messages)
    wanted = made_by(theirs, text, ours.family, **options)
    sample = ours(messages, response_ids=[500, 501, 106], sample_id="a")
    assert mp.validate([sample]) == []
    prompt = sample.input_ids[:-3]
    assert prompt.tolist() == wanted["input_ids"][0].tolist()
    types = np.zeros(len(prompt), int)
    for span in sample.modality_spans:
        types[span.start : span.stop] = 1 + (span.modality == "video")
    assert types.tolist() == wanted[ours.family.token_types][0].tolist()
    first, second, *clip = sample.media
    pictures = [first, second, first]
    if ours.family.pixel_layout == "tiles":
        assert torch.equal(pixels_of(pictures, ours.family, 0), wanted["pixel_values"])
    else:
        for own, kind in ((pictures, "image"), (clip, "video")):
            name = "pixel_values" if kind == "image" else "pixel_values_videos"
            values, places = pixels_of(own, ours.family, wanted[name].shape[1])
            assert torch.equal(values, wanted[name])
            assert torch.equal(places, wanted[f"{kind}_position_ids"])
    # what an engine is given: one id per medium
    short = ours.tokenizer(text, add_special_tokens=False)["input_ids"]
    again = ours.from_ids(short, media=media, expanded=False, sample_id="b")
    assert again.input_ids.tolist() == prompt.tolist()
    assert again.modality_spans == sample.modality_spans
    return sample


def test_equals_transformers_processor(theirs):
    family = mp.wrap_processor(theirs).family
    media = [WIDE, TALL, WIDE, *([(FRAMES, TIMES)] if family.video is not None else [])]
    check(theirs, {}, media)


def test_pan_and_scan():
    theirs = get_kit("gemma3").processor()
    theirs.image_processor.do_pan_and_scan = True
    sample = check(theirs, {"do_pan_and_scan": True}, [WIDE, TALL, WIDE])
    assert [m.grid_thw for m in sample.media] == [(3, 8, 8), (1, 8, 8)]
    assert [s.frame for s in sample.modality_spans] == [0, 1, 2, 0, 0, 1, 2]
    other = mp.wrap_processor(get_kit("gemma3").processor())
    plain = other(conversation(other.family), response_ids=[500, 501, 106], sample_id="a")
    report = mp.compare([sample], [plain])
    assert not report.ok
    assert "do_pan_and_scan" in str([f.evidence for f in report.findings])


@needs_gemma4
def test_sampling_is_transformers_own():
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    for total, fps, settings in (
        (100, 30.0, {}),
        (33, 24.0, {"num_frames": 7}),
        (90, 30.0, {"fps": 2.0}),
    ):
        info = clip(total, fps, 320, 200)
        plan = mp.video.sample(info, policy="transformers_uniform", **settings)
        given = settings or {"num_frames": 32}
        wanted = default_sample_indices_fn(VideoMetadata(total_num_frames=total, fps=fps), **given)
        assert list(plan.indices) == wanted.tolist()
        assert plan.grid_thw == (len(wanted), 18, 30)


@needs_gemma4
def test_pixels_of_a_medium_are_transformers_own():
    """Whoever hands transformers' rows over has what mmpack makes of the picture; so do packed frames."""
    hf = get_kit("gemma4").processor()
    ours = mp.wrap_processor(hf)
    made = hf.image_processor(images=[WIDE], return_tensors="pt")
    medium = ours.medium(WIDE)
    held = made["image_position_ids"][0][:, 0] >= 0
    assert torch.equal(torch.as_tensor(medium.pixel_values), made["pixel_values"][0][held])
    side = ours.family.patch_size * ours.family.spatial_merge_size
    frames = torch.randint(0, 256, (2, 3, side, 2 * side), dtype=torch.uint8)
    rows = mp.ops.pack_video(frames, "gemma4")
    plan = mp.video.plan_patches([tuple(frames.shape)], "gemma4")
    cut = frames.unfold(2, 16, 16).unfold(3, 16, 16)  # n, c, h, w, 16, 16
    assert torch.equal(rows, cut.permute(0, 2, 3, 4, 5, 1).reshape(rows.shape))
    assert torch.equal(mp.ops.unpack_video(rows, plan)[0], frames)
    leaf = rows.float().requires_grad_()
    weight = torch.randn(tuple(frames.shape))
    (mp.ops.unpack_video(leaf, plan)[0] * weight).sum().backward()
    assert torch.equal(leaf.grad, mp.ops.pack_video(weight, "gemma4"))


@needs_gemma4
def test_audio_and_bytes_whose_channels_differ_are_refused():
    hf = get_kit("gemma4").processor()
    with pytest.raises(ArgumentError, match="token 2 stands for audio"):
        mp.wrap_processor(hf).from_ids([2, 500, 258881, 501], sample_id="a")
    for part in (hf.image_processor, getattr(hf, "video_processor", None)):
        if part is not None:
            part.do_normalize = True
    mp.wrap_processor(hf, pixels="uint8")
    hf.image_processor.image_mean = [0.0, 0.5, 0.0]
    with pytest.raises(mp.ArgumentError, match=r"normalises the channels of gemma4 unlike.*Fix: "):
        mp.wrap_processor(hf, pixels="uint8")


@needs_gemma4
def test_patches_in_containers_tell_their_order():
    """Those that mmpack 0.2 wrote, channels first, are turned."""
    pyarrow = pytest.importorskip("pyarrow")
    from mmpack.adapters.arrow import from_table, to_table
    from mmpack.adapters.sample_columns import from_columns, to_columns

    ours = mp.wrap_processor(get_kit("gemma4").processor())
    sample = ours(conversation(ours.family), sample_id="a")
    rows = sample.media[0].pixel_values
    of_0_2 = rows.reshape(len(rows), -1, 3).swapaxes(1, 2).reshape(len(rows), -1)

    def through_columns(pixels):
        columns = to_columns(sample, "x")
        if pixels is not None:
            columns["pixel_values"][sample.media[0].cache_key] = pixels
        return from_columns(columns, "x")

    def through_a_table(pixels):
        table = to_table([sample])
        if pixels is not None:
            [held] = table["pixels"].to_pylist()
            held[0] |= {"shape": list(pixels.shape), "data": pixels.tobytes()}
            field = table.schema.field("pixels")
            held = pyarrow.array([held], field.type)
            table = table.drop(["pixels"]).append_column(field, held)
        return from_table(table)[0]

    for through in (through_columns, through_a_table):
        for written in (None, of_0_2):
            for mine, theirs in zip(through(written).media, sample.media, strict=True):
                assert np.array_equal(mine.pixel_values, theirs.pixel_values)


def test_a_black_frame_is_black_in_every_channel():
    how = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    how |= {"image_mean": [0.1, 0.5, 0.9], "image_std": [1.0, 0.5, 0.2]}
    family = get_family("gemma4")
    frames = torch.from_numpy(RANDOM.integers(0, 256, (2, 48, 96, 3), dtype=np.uint8))
    wanted = frames.clone()
    wanted[1] = 0
    rows, dark = (
        mp.ops.pack_video(x, family, **mp.video.normalization(how)).numpy()
        for x in (frames, wanted)
    )
    medium = mp.Medium("v", "video", "0" * 64, (2, 3, 6), 4, pixel_values=rows)
    made = blackened(medium, np.array([1]), family, None, {"video": how})
    assert np.array_equal(made.pixel_values, dark)
