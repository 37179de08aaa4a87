"""transformers and a real vLLM engine as two sides: alike on one checkpoint, and a fault is named at its module."""

import copy

import pytest
import torch
from support.engines import image, messages, reset, shared_engine, trainer, video

import mmpack as mp
from mmpack.adapters.transformers.probe import probe_side
from mmpack.adapters.vllm.probe import engine_side

pytestmark = pytest.mark.engine

PROMPTS = [
    messages(image(1)),
    messages(image(2, width=200), image(1), text="Which is larger?"),
    messages(video(3)),
    messages(text="What is the sum of the angles of a triangle, in degrees?"),
]


@pytest.fixture(scope="module")
def pair():
    """The engine's record, and the samples that it rolled out."""
    engine = shared_engine()
    reset(engine)
    samples = engine.rollout(PROMPTS, list("abcd"), n=1, max_new_tokens=4, temperature=0.8)
    return mp.probe.record(engine_side(engine), samples), samples


def test_one_checkpoint_is_alike_in_both(pair):
    record, samples = pair
    report = mp.probe.run(record, probe_side(trainer()[0], layout="packed"), samples)
    assert report.ok, report.text()
    names = {m.name for m in report.modules}
    for k in range(2):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert f"model.language_model.layers.{k}.self_attn.{part}<out" in names
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.language_model.layers.{k}.mlp.{part}<out" in names
            assert f"model.visual.blocks.{k}.mlp.{part}<out" in names
        assert f"model.language_model.layers.{k}.self_attn.o_proj<in" in names
        assert f"model.visual.blocks.{k}.attn.proj<in" in names
    assert {"model.visual.merger.mlp.2<out", "lm_head<out", "logprobs<out"} <= names
    assert {"model.language_model.rotary_emb<in", "model.visual.patch_embed.proj<in"} <= names


@pytest.mark.parametrize(
    "module",
    [
        "model.language_model.layers.1.self_attn.v_proj",
        "model.visual.blocks.1.mlp.down_proj",
        "model.visual.merger.mlp.2",
    ],
)
def test_a_rounded_weight_is_named(pair, module):
    record, samples = pair
    broken = copy.deepcopy(trainer()[0])
    weight = broken.get_submodule(module).weight
    weight.data = weight.data.bfloat16().float()
    first = mp.probe.run(record, probe_side(broken, layout="padded"), samples).first
    assert (first.module, first.side) == (module, "out")


def test_what_is_no_engine_is_refused():
    with pytest.raises(mp.ArgumentError, match="Fix: pass a VllmEngine"):
        engine_side(torch.nn.Linear(2, 2))
