"""Audio through `wrap_processor`, against transformers' own processors of families that hear: ids, features, spans."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("dashscope")

import torch
from PIL import Image
from support.heard import HEARING
from support.kits import get_kit

import mmpack as mp

pytestmark = pytest.mark.skipif(
    not get_kit(HEARING[0]).available,
    reason="this transformers keeps an Omni's towers beside its text model",
)
RATE = 16_000


@pytest.fixture(scope="module", params=HEARING)
def hf(request):
    return get_kit(request.param).processor()


@pytest.fixture(scope="module")
def processor(hf):
    return mp.wrap_processor(hf)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


def frames() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 255, (8, 56, 84, 3), dtype=np.uint8)


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def by_transformers(hf, messages, **media):
    """What the processor makes of the messages, their media handed over apart."""
    bare = [
        {
            **m,
            "content": [
                {k: v for k, v in p.items() if k in ("type", "text")} for p in m["content"]
            ],
        }
        for m in messages
    ]
    text = hf.apply_chat_template(bare, tokenize=False, add_generation_prompt=True)
    options = (
        {"videos_kwargs": {"fps": 2.0, "do_sample_frames": False}} if "videos" in media else {}
    )
    return hf(text=[text], return_tensors="pt", **options, **media)


def test_ids_features_and_spans(hf, processor):
    """One audio beside a picture, a video and text, then again beside another one."""
    sound, picture = noise(23_457), np.random.default_rng(2).integers(0, 255, (60, 90, 3), np.uint8)
    messages = asked(
        {"type": "audio", "audio": (sound, RATE)},
        {"type": "image", "image": picture},
        {"type": "video", "video": (frames(), {"fps": 2.0})},
    )
    sample = processor(messages, response_ids=[5, 6], sample_id="a")
    clip = torch.from_numpy(frames()).permute(0, 3, 1, 2)
    made = by_transformers(
        hf, messages, audio=[sound], images=[Image.fromarray(picture)], videos=[clip]
    )
    assert sample.input_ids[:-2].tolist() == made["input_ids"][0].tolist()
    audio = sample.media[0]
    mask = made["feature_attention_mask"][0].bool()
    assert np.array_equal(audio.pixel_values, made["input_features"][0].T[mask].numpy())
    assert audio.grid_thw == (int(mask.sum()), 1, 1)
    assert (audio.sampling_rate, audio.num_samples, audio.hop_length) == (RATE, len(sound), 160)
    assert [m.modality for m in sample.media] == ["audio", "image", "video"]
    assert not mp.validate(sample)
    ids = sample.input_ids
    again = processor.from_ids(ids, sample.media, loss_spans=sample.loss_spans, sample_id="a")
    assert again == sample


def test_a_video_with_its_sound(hf, processor):
    sound = noise(70_003)
    part = {"type": "video", "video": (frames(), {"fps": 2.0}), "audio": (sound, RATE)}
    messages = asked(part)
    sample = processor(messages, response_ids=[5, 6], sample_id="a")
    clip = torch.from_numpy(frames()).permute(0, 3, 1, 2)
    made = by_transformers(
        hf,
        messages,
        audio=[sound],
        videos=[clip],
        audio_from_video_indices=[0],
        load_audio_from_video=True,
    )
    assert sample.input_ids[:-2].tolist() == made["input_ids"][0].tolist()
    chunks = [(s.modality, s.chunk) for s in sample.modality_spans]
    assert chunks[:3] == [("video", 0), ("audio", 0), ("video", 1)]
    assert [m.modality for m in sample.media] == ["video", "audio"]
    assert not mp.validate(sample)
    # what an engine was sent: one placeholder for both
    kinds = {v: k for k, v in processor.family.placeholder_ids.items()}
    audio = processor.family.audio
    short, last = [], None
    for i in sample.input_ids.tolist():
        kind = kinds.get(i)
        if i not in (audio.start_id, audio.end_id, audio.token_id) and not (kind and kind == last):
            short.append(i)
        last = "video" if kind == "audio" else kind
    items = [processor.medium(part["video"]), processor.medium(part["audio"], kind="sound")]
    again = processor.from_ids(
        short, items, expanded=False, loss_spans=[(len(short) - 2, len(short))], sample_id="a"
    )
    assert again == sample


def test_one_audio_is_one_medium_and_extracted_once(processor):
    sound = noise(20_000, seed=5)
    misses = processor.cache.misses
    parts = [{"type": "audio", "audio": {"array": sound, "sampling_rate": RATE}}] * 2
    sample = processor(asked(*parts), response_ids=[1], sample_id="a")
    assert len(sample.media) == 1 and len(sample.modality_spans) == 2
    assert processor.cache.misses == misses + 1
    assert processor.medium((sound.tolist(), RATE)).cache_key == sample.media[0].cache_key
    other = processor.medium((noise(20_000, seed=6), RATE))
    assert other.cache_key != sample.media[0].cache_key


def test_a_file_is_decoded_at_the_models_rate(processor):
    samples = (noise(RATE) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    medium = processor.medium(file.getvalue())
    assert medium.modality == "audio" and medium.num_samples == RATE and medium.file_hash
    assert processor.medium((samples / np.float32(32768), RATE)).cache_key == medium.cache_key


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((noise(100), 8000), "the model hears 16000 a second"),
        ((noise(100), None), "a rate of None"),
        ((np.zeros((2, 8), np.float32), RATE), "in one"),
        ((np.zeros(8, np.int16), RATE), "expected floats"),
        ((np.full(999, np.nan, np.float32), RATE), "are not finite"),
        ((noise(4_000) * 32768, RATE), "the samples reach .*, expected -1 to 1"),
        ((noise(150), RATE), "too few for one token|refuses"),
    ],
)
def test_what_is_no_audio(processor, item, says):
    with pytest.raises(mp.ArgumentError, match=says) as error:
        processor.medium(item, kind="audio")
    assert "\n" not in str(error.value) and "Fix: " in str(error.value)


def test_an_audio_beyond_the_extractors_window(hf, processor):
    """Its window is 10 s. Qwen2.5-Omni's processor drops the rest, Qwen3-Omni's does not."""
    window = hf.feature_extractor.n_samples
    longer = (noise(4 * window), RATE)
    made = by_transformers(hf, asked({"type": "audio"}), audio=[longer[0]])
    if made["feature_attention_mask"].sum() * 160 == 4 * window:
        assert processor.medium(longer).num_samples == 4 * window
        return
    for item in (longer, (noise(window + 1), RATE)):
        with pytest.raises(
            mp.ArgumentError, match=r"s, and the feature extractor would drop all after 10 s"
        ):
            processor.medium(item)
    assert processor.medium((noise(window), RATE)).num_samples == window


def test_what_else_is_refused(hf, processor):
    import transformers

    medium = processor.medium((noise(9000), RATE), kind="sound")
    with pytest.raises(mp.ArgumentError, match="no video comes before it"):
        processor.from_ids([1, 2], [medium], expanded=False, sample_id="a")

    other = transformers.WhisperFeatureExtractor(feature_size=80)
    with pytest.raises(mp.ArgumentError, match=r"feature_extractor.feature_size is 80, .* has 128"):
        mp.wrap_processor(hf, feature_extractor=other)
    noisy = transformers.WhisperFeatureExtractor(feature_size=128, dither=1e-3)
    with pytest.raises(mp.ArgumentError, match="adds noise"):
        mp.wrap_processor(hf, feature_extractor=noisy)
