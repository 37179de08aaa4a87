"""Positions against transformers' own `get_rope_index`, on thousands of random layouts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from support.layouts import random_layout
from transformers import Qwen2_5_VLConfig

import mmpack as mp
from mmpack.families import get_family

MODELS = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
}
SHARED = ("glm4v", "glm4v_moe")  # images and videos have one id


def upstream(name: str):
    cls = getattr(transformers, MODELS[name] + "Model")
    config = getattr(transformers, MODELS[name] + "Config")()
    if name == "qwen2_5_vl":
        config.vision_config.tokens_per_second = 2  # as released
    with torch.device("meta"):
        model = cls.__new__(cls)
        torch.nn.Module.__init__(model)
    model.config = config
    return model


def kinds_of(ids, family, config):
    """1 for an image's token, 2 for a video's; of GLM as its own processor says."""
    if family.name not in SHARED:
        return torch.tensor((ids == family.image_token_id) + 2 * (ids == family.video_token_id))
    knows = SimpleNamespace(
        image_token_id=config.image_token_id,
        video_start_id=config.video_start_token_id,
        video_end_id=config.video_end_token_id,
    )
    return torch.tensor(
        transformers.Glm4vProcessor.create_mm_token_type_ids(knows, [ids.tolist()])[0]
    )


@pytest.mark.adapter
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_get_rope_index(name):
    rng = np.random.default_rng(0)
    model, family = upstream(name), get_family(name)
    assert model.config.image_token_id == family.image_token_id
    assert model.config.video_token_id == family.prompt_ids["video"]
    assert model.config.vision_config.patch_size == family.patch_size
    assert model.config.vision_config.spatial_merge_size == family.spatial_merge_size
    cuts = name == "qwen2_5_vl" and Version(transformers.__version__) < Version("5.19")
    for _ in range(100 if name in SHARED else 300):
        ids, images, videos, seconds = random_layout(rng, family)
        kinds = kinds_of(ids, family, model.config).int()
        extra = {"second_per_grid_ts": torch.tensor(seconds)} if name == "qwen2_5_vl" else {}
        wanted, delta = model.get_rope_index(
            torch.tensor(ids)[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            **(extra if videos else {}),
        )
        found, found_delta = mp.mrope_positions(
            ids,
            name,
            image_grid_thw=images,
            video_grid_thw=videos,
            second_per_grid_ts=seconds,
            rule="grid_int" if cuts else None,
        )
        assert found.dtype == np.int64
        assert np.array_equal(found, wanted[:, 0].numpy())
        assert found_delta == delta.item()


@pytest.mark.adapter
def test_one_row_equals_what_the_model_counts():
    """InternVL leaves positions to its text model: they are read where that rotates by them."""
    from support.tiny_models import tiny_model

    rng = np.random.default_rng(0)
    family, model = get_family("internvl"), tiny_model("internvl")
    rotary = model.model.language_model.rotary_emb
    seen = []
    hook = rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        ),
        with_kwargs=True,
    )
    for _ in range(5):
        ids, images, _, _ = random_layout(rng, family)
        embeds = model.get_input_embeddings()(torch.tensor(ids)[None])
        with torch.no_grad():
            model.model(inputs_embeds=embeds, use_cache=False)
        found, delta = mp.mrope_positions(ids, "internvl", image_grid_thw=images)
        assert found.shape == (1, len(ids)) and delta == 0
        assert np.array_equal(found, seen[-1].numpy())
    hook.remove()


def slow_max_rule(ids, images, videos, seconds, tokens_per_second):
    """The `max` rule token by token: text goes on at the largest position so far + 1."""
    images, videos, seconds = iter(images), iter(videos), iter(seconds)
    out, at = [], 0
    while at < len(ids):
        following = max((max(p) for p in out), default=-1) + 1
        if ids[at] not in (151655, 151656):
            out.append((following,) * 3)
            at += 1
            continue
        is_video = ids[at] == 151656
        t, h, w = next(videos if is_video else images)
        step = 1.0
        if is_video and tokens_per_second:
            step = tokens_per_second * float(np.float32(next(seconds)))
        for k in range(t):
            for y in range(h // 2):
                for x in range(w // 2):
                    offset = int(k * step)
                    out.append((following + offset, following + y, following + x))
        at += t * h * w // 4
    return np.array(out).T


@pytest.mark.parametrize(("name", "tps"), [("qwen2_vl", None), ("qwen2_5_vl", 2.0)])
def test_max_rule_token_by_token(name, tps):
    rng = np.random.default_rng(1)
    for _ in range(60):
        ids, images, videos, seconds = random_layout(rng, get_family(name))
        given = {"image_grid_thw": images, "video_grid_thw": videos, "second_per_grid_ts": seconds}
        found, delta = mp.mrope_positions(ids, name, rule="max", **given)
        assert np.array_equal(found, slow_max_rule(ids, images, videos, seconds, tps))
        assert delta == found.max() + 1 - len(ids)


@pytest.mark.parametrize("setting", ["config", "keyword"])
def test_tokens_per_second_from_config_or_keyword(setting):
    ids = np.array([151652] + [151656] * 3 + [151653])
    kwargs = {"tokens_per_second": 4} if setting == "keyword" else {"config": Qwen2_5_VLConfig()}
    found, _ = mp.mrope_positions(
        ids, "qwen2_5_vl", video_grid_thw=[[3, 2, 2]], second_per_grid_ts=[1.0], **kwargs
    )
    assert found[0].tolist() == [0, 1, 5, 9, 2]
    released, _ = mp.mrope_positions(
        ids, "qwen2_5_vl", video_grid_thw=[[3, 2, 2]], second_per_grid_ts=[1.0]
    )
    assert released[0].tolist() == [0, 1, 3, 5, 2]


IMAGE = [151652, 151655, 151655, 151655, 151655, 151653]


FRAMES = [27, 151652, 151656, 151653, 28, 151652, 151656, 151653]


@pytest.mark.parametrize(
    ("ids", "grids", "code", "span"),
    [
        (IMAGE, [], "MM104", (1, 5)),
        (IMAGE, [[1, 4, 4], [1, 2, 2]], "MM107", None),
        (IMAGE, [[1, 4, 6]], "MM101", (1, 5)),
        (IMAGE, [[0, 4, 4]], "MM102", (1, 5)),
        (IMAGE, [[2**40, 2**12, 2**12]], "MM101", (1, 5)),
        (IMAGE + [151655], [[1, 4, 4]], "MM104", (6, 7)),
        (FRAMES, [[1, 2, 2]], "MM104", (6, 7)),
        (FRAMES, [[2, 2, 4]], "MM101", (2, 3)),
        (FRAMES, [[2, 2, 2], [0, 2, 2]], "MM107", None),
        (FRAMES, [[1, 2, 2], [0, 2, 2]], "MM102", (6, 7)),
        (FRAMES, [[-5, 2, 2]], "MM104", (6, 7)),
        ([151652, 151656, 151656, 151653], [[2, 2, 2]], "MM107", None),  # one run for two patches
    ],
)
def test_what_does_not_fit_names_the_span(ids, grids, code, span):
    name, kind = ("qwen2_5_vl", "image") if ids[:6] == IMAGE else ("qwen3_vl", "video")
    with pytest.raises(mp.LayoutError) as caught:
        mp.mrope_positions(ids, name, **{f"{kind}_grid_thw": grids})
    assert (caught.value.code, caught.value.span) == (code, span)
    assert "\n" not in str(caught.value)


def test_wrong_arguments():
    with pytest.raises(mp.ArgumentError, match="rule 'middle' is unknown"):
        mp.mrope_positions([1], "qwen2_vl", rule="middle")
    with pytest.raises(mp.ArgumentError, match=r"expected \[L\]"):
        mp.mrope_positions([[1]], "qwen2_vl")
    with pytest.raises(mp.LayoutError, match="MM006"):
        mp.mrope_positions([1], "llava")
    video = [151656]
    for grids in ([1, 2], "x", [float("nan")] * 3):
        with pytest.raises(mp.ArgumentError, match=r"image_grid_thw .* are not grids\. Fix: "):
            mp.mrope_positions([1, 2], "qwen2_vl", image_grid_thw=grids)
    for seconds in ([], [1.0, 2.0], [float("nan")], ["soon"], [None, []], [10**400]):
        with pytest.raises(mp.ArgumentError, match="second_per_grid_ts"):
            mp.mrope_positions(
                video, "qwen2_5_vl", video_grid_thw=[[1, 2, 2]], second_per_grid_ts=seconds
            )
