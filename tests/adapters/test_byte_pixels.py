"""pixels="uint8": samples, features and logprobs equal to those of float32 pixels, bit for bit, for every family."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import small_model
from support.replicas.internvl_processor import internvl_processor

import mmpack as mp
from mmpack.adapters.processed_media import inputs_of_media, pixels_of
from mmpack.adapters.transformers import SampleCollator, attach, packed_logprobs
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.demo.vocabulary import qwen_tokenizer
from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.packing.pixels import as_floats, float_pixels
from mmpack.processors.pixels import as_bytes
from mmpack.video.drop import blackened

pytestmark = pytest.mark.adapter
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]


@pytest.fixture(scope="module")
def processors():
    """By family, one transformers processor wrapped twice: float32 and uint8."""
    tokenizer, made = qwen_tokenizer(), {}

    def pair(family):
        if family not in made:
            if family == "internvl":
                hf = internvl_processor(tile=56, max_tiles=4)
            else:
                unit = get_family(family).patch_size * 2
                bounds = {"min_pixels": 4 * unit**2, "max_pixels": 16 * unit**2}
                hf = qwen_vl_processor(family, tokenizer=tokenizer, **bounds)
            made[family] = [mp.wrap_processor(hf, pixels=p) for p in ("float32", "uint8")]
        return made[family]

    return pair


def drawn(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def conversation(family, seed=0):
    parts = [{"type": "image", "image": Image.fromarray(drawn((90, 123, 3), seed))}]
    if family != "internvl":
        # frames of qwen-vl-utils are floats; these are of the family's own policy
        parts.append({"type": "video", "video": (drawn((5, 80, 64, 3), seed), {"fps": 2})})
        parts.append({"type": "image", "image": Image.fromarray(drawn((64, 64, 3), seed + 1))})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]


def both(processors, family):
    return [
        [
            p(
                conversation(family, g),
                [1, 2, 3 + k],
                sample_id=f"{g}/{k}",
                group_id=f"{g}",
            )
            for g in range(2)
            for k in range(2)
        ]
        for p in processors(family)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_pixels(processors, family):
    floats, held = both(processors, family)
    for a, b in zip(floats, held, strict=True):
        assert a == b and a.processor_fingerprint == b.processor_fingerprint
        for m, n in zip(a.media, b.media, strict=True):
            assert (m.cache_key, m.content_hash) == (n.cache_key, n.content_hash)
            assert (m.pixel_values.dtype, n.pixel_values.dtype) == (np.float32, np.uint8)
            assert m.pixel_values.nbytes == 4 * n.pixel_values.nbytes
    one, other = (mp.pack(s, share_prefix=family != "internvl") for s in (floats, held))
    assert other.pixel_values.dtype == torch.uint8 and one.byte_values == {}
    assert torch.equal(float_pixels(other), one.pixel_values)
    half = float_pixels(other, dtype=torch.bfloat16)
    assert torch.equal(half, one.pixel_values.bfloat16())
    some = [len(one.media) - 1, 0]
    assert torch.equal(float_pixels(other, some), float_pixels(one, some))
    padded = mp.pad(held)
    assert torch.equal(float_pixels(padded), mp.pad(floats).pixel_values)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_logprobs(processors, family):
    model = small_model(family)
    floats, held = both(processors, family)
    with attach(model), torch.no_grad():
        for lay in (mp.pad, mp.pack):
            a, b = (packed_logprobs(model, lay(s)) for s in (floats, held))
            assert torch.equal(a, b) and a.abs().max() > 0


def test_the_collator_and_frameworks_get_floats(processors):
    floats, held = both(processors, "qwen2_5_vl")
    collator = SampleCollator(small_model("qwen2_5_vl"), padding="left")
    a, b = collator(floats), collator(held)
    names = ("pixel_values", "pixel_values_videos")
    assert all(torch.equal(a[n], b[n]) and b[n].dtype == torch.float32 for n in names)
    a, b = inputs_of_media(floats[0]), inputs_of_media(held[0])
    assert all(torch.equal(a[n], b[n]) for n in names)
    a, b = pixels_of(mp.pack(floats)), pixels_of(mp.pack(held))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_bytes_that_can_not_be_read(processors):
    """Beside floats, of another normalisation, and those that nobody explains."""
    floats, held = both(processors, "qwen2_5_vl")
    other = copy.deepcopy(held[-1])
    other.processor["image"]["image_mean"] = [0.5] * 3
    bare = dataclasses.replace(held[0], processor=None, processor_fingerprint=None)
    for call, match in (
        (lambda: mp.pack([held[0], floats[-1]]), r"pack: .*torch.uint8.* Fix: make all samples"),
        (lambda: mp.pack([held[0], other]), "normalised unlike the images before"),
        (lambda: float_pixels(mp.pack([bare])), r"Sample.processor doesn't say.*Fix: "),
        (lambda: inputs_of_media(bare), r"Sample.processor doesn't say.*Fix: "),
    ):
        with pytest.raises(ArgumentError, match=match):
            call()


def test_a_processor_that_leaves_bytes_alone(processors):
    hf = qwen_vl_processor("qwen2_5_vl", tokenizer=processors("qwen2_5_vl")[0].tokenizer)
    with pytest.raises(ArgumentError, match="pixels is 'int8'"):
        mp.wrap_processor(hf, pixels="int8")
    hf.image_processor.do_normalize = False
    with pytest.raises(ArgumentError, match=r"do_normalize=False.*Fix: "):
        mp.wrap_processor(hf, pixels="uint8")


def test_values_between_the_bytes():
    whole = np.array([[0.0, 255.0, 3.0]], np.float32)
    assert as_bytes(whole, "media[0]").tolist() == [[0, 255, 3]]
    for odd in (0.5, -1.0, 256.0, np.nan):
        with pytest.raises(ArgumentError, match="between whole bytes"):
            as_bytes(np.array([[odd]], np.float32), "media[0]")


def test_black_frames_of_bytes(processors):
    floats, held = both(processors, "qwen2_5_vl")
    made = []
    for sample in (floats[0], held[0]):
        video = next(m for m in sample.media if m.modality == "video")
        made.append(
            blackened(video, np.array([1]), get_family("qwen2_5_vl"), None, sample.processor)
        )
    assert made[1].pixel_values.dtype == np.uint8
    values = as_floats(made[1].pixel_values, "video", held[0].processor)
    assert np.array_equal(values.numpy(), made[0].pixel_values)
