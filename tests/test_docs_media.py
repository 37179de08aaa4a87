"""The code of docs/video.md, docs/audio.md and docs/stability.md runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.kits import get_kit
from support.models import small_model
from test_docs_run import run

import mmpack as mp
from mmpack.demo.clips import clip_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor

pytestmark = pytest.mark.adapter


@pytest.fixture
def clip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [exercise] = clip_exercises(1)
    Path("clip.mp4").write_bytes(exercise.video)
    Path("videos").mkdir()
    Path("videos/a.mp4").write_bytes(exercise.video)


def test_video(clip):
    pytest.importorskip("av")
    rng = np.random.default_rng(0)
    names = {
        "hf_processor": qwen_vl_processor(),
        "response_ids": [1, 2, 3],
        "clips": [rng.integers(0, 256, (n, 56, 84, 3), dtype=np.uint8) for n in (4, 2)],
    }
    ran = run("docs/video.md", names)
    assert mp.validate([ran["recorded"]]) == [] and len(ran["frames"]) == 4
    assert ran["rows"].abs().max() < 5  # normalised
    for given, same in zip(names["clips"], ran["same"], strict=True):
        assert np.array_equal(same, given)


def test_audio(clip):
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("av")
    kit = get_kit("qwen2_5_omni")
    if not kit.available:
        pytest.skip("this transformers keeps an Omni's towers beside its text model")
    noise = np.random.default_rng(0).normal(0, 0.1, 22_050).astype(np.float32)
    soundfile.write("call.wav", noise, 22_050)
    model = small_model("qwen3_omni_moe")
    names = {"mp": mp, "hf": kit.processor(), "ids": [1, 2, 3], "model": model, "torch": torch}
    ran = run("docs/audio.md", names)
    towers = {name.split(".")[1] for name in ran["linear"]}
    assert towers == {"audio_tower", "visual", "language_model"} and "lm_head" not in ran["linear"]
    sample = ran["sample"]
    assert mp.validate([sample]) == []
    assert [medium.modality for medium in sample.media] == [
        "audio",
        "video",
    ]  # the clip's sound is the call
    assert sample.media[0].sampling_rate == 16_000


def test_stability():
    import warnings

    with warnings.catch_warnings():
        run("docs/stability.md", {})
        with pytest.raises(mp.errors.DeprecatedWarning):
            warnings.warn("gone in 0.4", mp.errors.DeprecatedWarning, stacklevel=1)
