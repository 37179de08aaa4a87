"""Sliding windows and two-way blocks: packed, shared and padded rows get what transformers' own masks give a sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from support.models import relative_difference, spread_out
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach
from mmpack.adapters.transformers.attention import attention_plan_of
from mmpack.adapters.transformers.layer_rules import KEEPS_TO_WINDOW, LayerPlans, layer_rules
from mmpack.contracts import TOLERANCES
from mmpack.families import FAMILIES

pytestmark = pytest.mark.adapter
IMAGE = 151655
WINDOW = 7


@pytest.fixture
def family(monkeypatch):
    """Qwen2-VL's layout of samples, with the attention of Gemma 3."""
    made = replace(
        FAMILIES["qwen2_vl"],
        model_types=("gemma3",),
        two_way_media=("image",),
        position_rows=1,
        position_rules=("count",),
    )
    monkeypatch.setitem(FAMILIES, "qwen2_vl", made)
    return made


@pytest.fixture(scope="module")
def model():
    text = {
        "vocab_size": 151_936,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"],
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    return spread_out(transformers.Gemma3ForConditionalGeneration(config)).eval()


def samples_of(name):
    rng = np.random.default_rng(5)

    def text(n):
        return "text", rng.integers(0, 151_643, n)

    def response(n):
        return "response", rng.integers(0, 151_643, n)

    image, other = ("image", (1, 4, 4), "x"), ("image", (1, 4, 6), "y")
    prompt = [text(4), image, text(3)]
    parts = {
        "text": [[text(n), response(m)] for n, m in ((3, 20), (9, 1), (1, 6))],
        "tree": [
            [*prompt, response(12), other, text(1), response(9)],
            [*prompt, response(2), text(4), response(2)],
            [*prompt, response(2), image, response(5)],
            [text(5), other, response(3)],
            [text(2), response(2)],
        ],
    }[name]
    return [make_sample(p, f"s{i}", family="qwen2_vl") for i, p in enumerate(parts)]


def rows_alone(model, sample, kinds):
    """Hidden states [L, H] by transformers' own masks, of the sample by itself."""
    out = model.model(
        input_ids=torch.from_numpy(sample.input_ids)[None],
        token_type_ids=kinds,
        use_cache=False,
    )
    return out.last_hidden_state[0]


def types_of(sample):
    return torch.from_numpy((sample.input_ids == IMAGE).astype(np.int64))[None]


def inputs_of(batch, model):
    packed = isinstance(batch, mp.PackedBatch)
    return {
        "input_ids": batch.input_ids[None] if packed else batch.input_ids,
        "position_ids": batch.position_ids[0] if not packed else batch.position_ids,
        "visible_until": batch.visible_until,
        "visible_from": batch.visible_from,
        "attention_plan": attention_plan_of(batch, model),
        "use_cache": False,
    }


LAYOUTS = {
    "packed": lambda s: mp.pack(s, pad_to_multiple_of=16),
    "shared": lambda s: mp.pack(s, share_prefix=True),
    "left": lambda s: mp.pad(s, side="left"),
    "right": lambda s: mp.pad(s, side="right"),
}


@pytest.mark.parametrize("name", ["text", "tree"])
def test_hidden_states_are_those_of_each_sample_alone(model, family, name):
    samples = samples_of(name)
    with torch.no_grad():
        alone = [rows_alone(model, s, types_of(s)) for s in samples]
        for layout, make in LAYOUTS.items():
            batch = make(samples)
            with attach(model, tower="keep"):
                out = model.model(**inputs_of(batch, model)).last_hidden_state.flatten(0, 1)
            for a, b in zip(batch.unpack_tokens(out), alone, strict=True):
                print(layout, (a - b).abs().max())
