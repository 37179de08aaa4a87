"""A real vLLM engine is given the planned frames of a video file, and sees what the trainer makes of the same file."""

import os
import sys

import numpy as np
import pytest
import torch
from support.engines import messages, reset, shared_engine, trainer
from support.process import run_python

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.vllm import to_samples
from mmpack.contracts import TOLERANCES
from mmpack.demo.clips import clip_exercises

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def clips():
    return [exercise.video for exercise in clip_exercises(3)]


@pytest.fixture
def engine():
    engine = shared_engine()
    reset(engine)
    return engine


def film(item):
    return messages({"type": "video", "video": item}, text="Which colour comes second?")


def train_side(processor, prompts, rollouts):
    n = len(rollouts) // len(prompts)
    return [
        processor(
            prompts[i // n],
            s.input_ids[s.loss_indices],
            sample_id=s.sample_id,
            group_id=s.group_id,
            sampling=s.sampling,
            finish_reason=s.finish_reason,
        )
        for i, s in enumerate(rollouts)
    ]


@pytest.mark.parametrize("policy", [None, "qwen_vl_utils", "vllm"])
def test_both_sides_make_one_plan_of_a_file(engine, clips, policy, monkeypatch, tmp_path):
    (tmp_path / "a.mp4").write_bytes(clips[0])
    options = {"media_root": tmp_path, "video_policy": policy, "position_rule": "max"}
    options["video_settings"] = {} if policy == "vllm" else {"fps": 2.0}
    monkeypatch.setattr(engine, "processor", mp.wrap_processor(engine.hf_processor, **options))
    prompts = [film("a.mp4"), film(clips[1])]
    rollouts = engine.rollout(prompts, ["a", "b"], n=2, max_new_tokens=5)
    model, hf = trainer()
    processor = mp.wrap_processor(hf, **options)
    train = train_side(processor, prompts, rollouts)
    report = mp.compare(rollouts, train)
    assert report.ok, report.findings
    for mine, theirs in zip(train, rollouts, strict=True):
        a, b = mine.media[0], theirs.media[0]
        assert a.cache_key == b.cache_key and (a.source, a.file_hash) == (b.source, b.file_hash)
        assert np.array_equal(a.pixel_values, b.pixel_values)
        assert a.second_per_grid_ts == b.second_per_grid_ts != 1.0
    assert rollouts[0].media[0].source == "a.mp4"
    batch = mp.pack(train, share_prefix=True)
    with attach(model), torch.no_grad():
        pieces = batch.unpack_loss(packed_logprobs(model, batch))
    for s, lp in zip(rollouts, pieces, strict=True):
        assert np.abs(s.rollout_logprobs - lp.numpy()).max() <= TOLERANCES["engines_max"].value


def test_what_vllm_was_handed_is_enough_to_record(engine, clips):
    """Samples of another's outputs: frames and metadata tell the plan, though not the file."""
    from vllm import SamplingParams

    prompt = engine.prompt(film(clips[0]))
    [given] = engine.render([prompt])
    params = SamplingParams(max_tokens=2, logprobs=1)
    outputs = engine.generate([given], params, True)
    [s] = to_samples(
        outputs, [given], [prompt], params, engine.processor, logprobs_mode="raw_logprobs"
    )
    [whole] = engine.processor(film(clips[0]), sample_id="s").media
    [medium] = s.media
    assert medium.source is medium.file_hash is None
    for name in ("cache_key", "frame_timestamps", "second_per_grid_ts", "total_frames", "fps"):
        assert getattr(medium, name) == getattr(whole, name), name
    assert np.array_equal(medium.frame_indices, whole.frame_indices)


QWEN3 = """
import sys
import numpy as np
import mmpack as mp
from mmpack.demo.clips import clip_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor
from support.tiny_models import tiny_model
from mmpack.adapters.vllm import VllmEngine

folder = sys.argv[1]
tiny_model("qwen3_vl").save_pretrained(folder)
qwen_vl_processor("qwen3_vl", min_pixels=3136, max_pixels=12 * 16 * 784).save_pretrained(folder)
film = {"type": "video", "video": clip_exercises(1)[0].video}
messages = [{"role": "user", "content": [film, {"type": "text", "text": "Which?"}]}]
with VllmEngine(folder) as engine:
    for policy in (None, "qwen_vl_utils", "vllm"):
        engine.processor = mp.wrap_processor(engine.hf_processor, video_policy=policy)
        [s] = engine.rollout([messages], ["g"], n=1, max_new_tokens=3)
        recorded = {"sampling": s.sampling, "finish_reason": s.finish_reason}
        ids = s.input_ids[s.loss_indices]
        mine = engine.processor(messages, ids, sample_id=s.sample_id, group_id="g", **recorded)
        report = mp.compare([s], [mine])
        assert report.ok, report.findings
        assert np.array_equal(s.media[0].pixel_values, mine.media[0].pixel_values)
        assert len(mine.modality_spans) == mine.media[0].grid_thw[0] > 1
print("three policies")
"""


def test_seconds_in_text_are_the_plans(tmp_path):
    """Qwen3-VL, whose engine writes the times itself; an engine of its own, in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = run_python(QWEN3, str(tmp_path), env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "three policies" in done.stdout
