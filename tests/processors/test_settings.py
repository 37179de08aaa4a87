"""The fingerprint changes with what decides tokens, grids, pixels or positions, and with nothing else."""

import copy
import hashlib
import json
import pickle

import numpy as np
import pytest
import tokenizers
import transformers
from PIL import Image

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.processors.settings import vision_settings

pytestmark = pytest.mark.adapter


def pil(**settings):
    kind = transformers.Qwen2VLImageProcessorPil
    # transformers before 5.19 writes min_pixels and max_pixels into the class's own size
    return kind(**{"size": dict(kind.size)} | settings)


# sha256 of the chat template and of the vocabulary are computed by other means below
GOLDEN = {
    "backend": "pil",
    "do_resize": True,
    "resample": 3,
    "min_pixels": 3136,
    "max_pixels": 50176,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def test_golden(processor, hf):
    """The same under every transformers version."""
    settings = processor.settings
    assert settings["image"] == GOLDEN
    assert (settings["family"], settings["position_rule"]) == ("qwen2_5_vl", "grid")
    assert settings["tokens_per_second"] == 2.0
    assert settings["tokenizer"]["special_ids"]["<|image_pad|>"] == 151655
    assert len(settings["tokenizer"]["special_ids"]) == 22
    assert settings["tokenizer"]["vocab_sha256"] == (
        "3b15706f4d44a6e9298fb9659de247fc7a1afb59c6989b184fbb354e8332dd60"
    )
    assert "video_markers" not in settings
    assert json.loads(json.dumps(settings)) == settings


@pytest.mark.parametrize(
    "changed",
    [
        {"min_pixels": 3137},
        {"patch_size": 16},
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": [0.26862954, 0.26130258, 0.27577712]},
        {"resample": Image.Resampling.BILINEAR},
        {"rescale_factor": 1 / 127.5},
        {"do_resize": False},
        {"do_convert_rgb": False},
    ],
    ids=lambda c: next(iter(c)),
)
def test_image_settings_that_matter(processor, changed):
    before = processor.fingerprint
    processor.parts.image_processor = pil(**{"min_pixels": 3136, "max_pixels": 50176} | changed)
    assert processor.fingerprint != before


@pytest.mark.parametrize(
    "same",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 50176}},
        {"image_mean": np.array([0.48145466, 0.4578275, 0.40821073])},
        {"resample": Image.Resampling.BICUBIC},
        {"rescale_factor": np.float64(1 / 255)},
        {"min_pixels": np.int64(3136)},
        {"data_format": "channels_first"},
    ],
    ids=str,
)
def test_image_settings_that_do_not(processor, same):
    before = processor.fingerprint
    bounds = {} if "size" in same else {"min_pixels": 3136, "max_pixels": 50176}
    processor.parts.image_processor = pil(**bounds | same)
    assert processor.fingerprint == before


@pytest.mark.parametrize(
    ("switch", "setting"),
    [
        ("do_resize", {"min_pixels": 9999}),
        ("do_resize", {"resample": 2}),
        ("do_rescale", {"rescale_factor": 1.0}),
        ("do_normalize", {"image_mean": [0.1, 0.2, 0.3]}),
    ],
)
def test_switched_off_settings_do_not_count(switch, setting):
    assert vision_settings(pil(**{switch: False})) == vision_settings(
        pil(**{switch: False} | setting)
    )
    assert vision_settings(pil()) != vision_settings(pil(**setting))


def test_other_settings_that_matter(hf, make_hf):
    one = mp.wrap_processor(hf).fingerprint
    others = [
        mp.wrap_processor(hf, chat_template=hf.chat_template + " ").fingerprint,
        mp.wrap_processor(hf, position_rule="max").fingerprint,
        mp.wrap_processor(hf, tokens_per_second=4).fingerprint,
        mp.wrap_processor(make_hf("qwen2_vl")).fingerprint,
    ]
    assert len({one, *others}) == 5
    assert mp.wrap_processor(hf, tokens_per_second=2).fingerprint == one
    assert mp.wrap_processor(hf, cache_bytes=1, media_root="x").fingerprint == one


def test_tokenizer_settings(hf):
    one = mp.wrap_processor(hf).fingerprint
    tokenizer = copy.deepcopy(hf.tokenizer)
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "left"
    tokenizer.model_max_length = 77
    same = mp.wrap_processor(hf, tokenizer=tokenizer)
    assert same.fingerprint == one
    tokenizer.add_tokens(["<|box_9|>"], special_tokens=True)
    after = same.settings["tokenizer"]  # added after it was wrapped
    assert after["special_ids"]["<|box_9|>"] == 151665
    assert same.fingerprint == mp.wrap_processor(hf, tokenizer=tokenizer).fingerprint != one


def small_tokenizer(merges):
    """Byte pairs over a, b and c; the vocabulary is always the same."""
    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    model = tokenizers.models.BPE(vocab=vocab, merges=merges)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))


def test_merges_count():
    """One vocabulary, one text, other ids: the merges' order decides."""
    orders = [[("a", "b"), ("b", "c"), ("ab", "c")], [("b", "c"), ("a", "b"), ("ab", "c")]]
    first, second = (
        mp.wrap_processor(tokenizer=small_tokenizer(m), family="qwen2_vl") for m in orders
    )
    assert first.tokenizer("abc")["input_ids"] != second.tokenizer("abc")["input_ids"]
    one, other = (p.settings["tokenizer"] for p in (first, second))
    assert one["vocab_sha256"] == other["vocab_sha256"]
    lines = "\n".join(" ".join(pair) for pair in orders[0])
    assert one["merges_sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    assert one["merges_sha256"] != other["merges_sha256"]
    assert first.fingerprint != second.fingerprint


def test_a_vocabulary_is_hashed_once(hf, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "mmpack.processors.settings.vocabulary_hash", lambda tokenizer: calls.append(1) or "00"
    )
    tokenizer = copy.deepcopy(hf.tokenizer)
    first, second = (mp.wrap_processor(hf, tokenizer=tokenizer) for _ in range(2))
    for processor in (first, second, first, second):
        assert processor.settings["tokenizer"]["vocab_sha256"] == "00"
    assert len(calls) == 1
    worker = pickle.loads(pickle.dumps(first))  # what was hashed travels
    assert worker.settings == first.settings and len(calls) == 1
    tokenizer.add_tokens(["<|box_9|>"])
    assert first.fingerprint == second.fingerprint and len(calls) == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"position_rule": "rows"}, ArgumentError, "position_rule 'rows'"),
        ({"family": "qwen2_vl", "tokens_per_second": 2}, ArgumentError, "does not count"),
        (
            {"image_processor": pil(merge_size=4)},
            ArgumentError,
            "merge_size is 4, qwen2_5_vl has 2",
        ),
        ({"image_processor": pil(patch_size=16)}, ArgumentError, "patch_size is 16, .* has 14"),
        ({"chat_template": {"default": "x"}}, ArgumentError, "is dict"),
    ],
)
def test_wrong_settings(hf, options, error, match):
    with pytest.raises(error, match=match) as caught:
        mp.wrap_processor(hf, **options)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)
