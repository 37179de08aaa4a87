"""Positions against vLLM's own `get_mrope_input_positions`, on random layouts: the rule that it follows, by family."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support.layouts import random_layout

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.runs import placeholder_runs

pytestmark = pytest.mark.engine
# module, class, transformers' prefix of class names, the rule that vLLM follows
MODELS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", "max"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL", "max"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", "grid"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoe", "grid"),
    "qwen3_5": ("qwen3_5", "Qwen3_5", "grid"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5Moe", "grid"),
}


def engine_model(name):
    module, prefix, _ = MODELS[name]
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    kind = getattr(found, f"{prefix}ForConditionalGeneration")
    model = kind.__new__(kind)  # positions read only its config
    torch.nn.Module.__init__(model)
    model.config = getattr(transformers, f"{prefix}Config")()
    if name == "qwen2_5_vl":
        model.config.vision_config.tokens_per_second = 2  # as released
    return model


def features_of(ids, images, videos, seconds, family):
    """What vLLM's processor would hand over: each medium with its place."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def feature(modality, start, stop, **data):
        fields = {key: SimpleNamespace(data=value) for key, value in data.items()}
        place = PlaceholderRange(offset=start, length=stop - start)
        return MultiModalFeatureSpec(
            data=fields, modality=modality, identifier=str(start), mm_position=place
        )

    runs = placeholder_runs(ids, family)
    out, at = [], 0
    images, videos, seconds = iter(images), iter(videos), iter(seconds)
    while at < len(runs):
        if not runs.is_video[at]:
            out.append(
                feature(
                    "image",
                    int(runs.starts[at]),
                    int(runs.stops[at]),
                    image_grid_thw=torch.tensor(next(images)),
                )
            )
            at += 1
            continue
        grid = next(videos)
        count = family.spans_of("video", grid)
        start = int(runs.starts[at]) - (family.video_layout == "frames")
        more = {}
        if family.tokens_per_second is not None:  # only this processor tells the seconds
            more["second_per_grid_ts"] = torch.tensor(next(seconds))
        out.append(
            feature(
                "video",
                start,
                int(runs.stops[at + count - 1]),
                video_grid_thw=torch.tensor(grid),
                **more,
            )
        )
        at += count
    return out


@pytest.mark.parametrize("name", MODELS)
def test_vllm_follows(name):
    rng = np.random.default_rng(0)
    family, rule, model = get_family(name), MODELS[name][-1], engine_model(name)
    others, excluded = [r for r in family.position_rules if r != rule], set()
    for _ in range(1000):
        ids, images, videos, seconds = random_layout(rng, family, image_frames=1)
        given = {"image_grid_thw": images, "video_grid_thw": videos, "second_per_grid_ts": seconds}
        wanted, delta = model.get_mrope_input_positions(
            ids.tolist(), features_of(ids, images, videos, seconds, family)
        )
        found, found_delta = mp.mrope_positions(ids, name, rule=rule, **given)
        assert np.array_equal(found, wanted.numpy())
        assert found_delta == delta
        for other in others:
            if not np.array_equal(mp.mrope_positions(ids, name, rule=other, **given)[0], wanted):
                excluded.add(other)
    assert excluded == set(others)  # it follows this rule and no other
