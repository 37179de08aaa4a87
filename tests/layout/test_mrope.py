"""Positions against transformers' own `get_rope_index`, on thousands of random layouts."""

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

import mmpack as mp
from mmpack.families import get_family

MODELS = {
    "qwen2_vl": (Qwen2VLModel, Qwen2VLConfig),
    "qwen2_5_vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig),
}


def upstream(name: str):
    cls, config_cls = MODELS[name]
    config = config_cls()
    if name == "qwen2_5_vl":
        config.vision_config.tokens_per_second = 2  # as released
    with torch.device("meta"):
        model = cls.__new__(cls)
        torch.nn.Module.__init__(model)
    model.config = config
    return model


def random_layout(rng: np.random.Generator, videos: bool = True):
    """ids, image grids, video grids, seconds: text, media and text again, media always fenced."""
    ids, images, video_grids, seconds = [], [], [], []
    for _ in range(rng.integers(0, 6)):
        ids += rng.integers(0, 1000, rng.integers(0, 9)).tolist()
        is_video = videos and rng.random() < 0.4
        grid = [
            int(rng.integers(1, 7)) if is_video else int(rng.integers(1, 3)),
            2 * int(rng.integers(1, 9)),
            2 * int(rng.integers(1, 9)),
        ]
        count = grid[0] * grid[1] * grid[2] // 4
        ids += [151652] + [151656 if is_video else 151655] * count + [151653]
        if is_video:
            video_grids.append(grid)
            seconds.append(float(rng.choice([0.5, 1.0, 0.08, 0.3333, 2.7, 1 / 3])))
        else:
            images.append(grid)
    ids += rng.integers(0, 1000, rng.integers(1, 9)).tolist()
    return np.array(ids), images, video_grids, seconds


@pytest.mark.adapter
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_get_rope_index(name):
    rng = np.random.default_rng(0)
    model = upstream(name)
    cuts = name == "qwen2_5_vl" and Version(transformers.__version__) < Version("5.19")
    for _ in range(2000):
        ids, images, videos, seconds = random_layout(rng)
        kinds = torch.tensor((ids == 151655) + 2 * (ids == 151656)).int()
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
            rule="grid_int" if cuts else "grid",
        )
        assert found.dtype == np.int64
        assert np.array_equal(found, wanted[:, 0].numpy())
        assert found_delta == delta.item()


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
        step = np.float32(1.0)
        if is_video and tokens_per_second:
            step = np.float32(tokens_per_second) * np.float32(next(seconds))
        for k in range(t):
            for y in range(h // 2):
                for x in range(w // 2):
                    offset = int(np.float32(k) * step)
                    out.append((following + offset, following + y, following + x))
        at += t * h * w // 4
    return np.array(out).T


@pytest.mark.parametrize(("name", "tps"), [("qwen2_vl", None), ("qwen2_5_vl", 2.0)])
def test_max_rule_token_by_token(name, tps):
    rng = np.random.default_rng(1)
    for _ in range(200):
        ids, images, videos, seconds = random_layout(rng)
        found, delta = mp.mrope_positions(
            ids,
            name,
            image_grid_thw=images,
            video_grid_thw=videos,
            second_per_grid_ts=seconds,
            rule="max",
        )
        assert np.array_equal(found, slow_max_rule(ids, images, videos, seconds, tps))
        assert delta == found.max() + 1 - len(ids)


def test_the_two_rules_part_where_the_field_saw_it():
    """A [20, 28, 28] video: text goes on 14 or 83-minus-the-start positions later (measured in the wild)."""
    ids = np.array([1, 2, 3, 4, 5, 151652] + [151656] * (20 * 14 * 14) + [151653, 7])
    given = {"video_grid_thw": [[20, 28, 28]], "second_per_grid_ts": [2.0]}
    first = 6 + 20 * 14 * 14
    grid, _ = mp.mrope_positions(ids, "qwen2_5_vl", **given)
    most, _ = mp.mrope_positions(ids, "qwen2_5_vl", rule="max", **given)
    assert grid[0, first] == 20
    assert most[0, first] == 83


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


@pytest.mark.parametrize(
    ("ids", "grids", "code", "span"),
    [
        (IMAGE, [], "MM104", (1, 5)),
        (IMAGE, [[1, 4, 4], [1, 2, 2]], "MM107", None),
        (IMAGE, [[1, 4, 6]], "MM101", (1, 5)),
        (IMAGE, [[1, 3, 4]], "MM102", (1, 5)),
        (IMAGE, [[0, 4, 4]], "MM102", (1, 5)),
        (IMAGE, [[2**40, 2**12, 2**12]], "MM101", (1, 5)),
        (IMAGE + [151655], [[1, 4, 4]], "MM104", (6, 7)),
    ],
)
def test_malformed_input_names_the_span(ids, grids, code, span):
    with pytest.raises(mp.LayoutError) as caught:
        mp.mrope_positions(ids, "qwen2_5_vl", image_grid_thw=grids)
    assert caught.value.code == code
    assert caught.value.span == span
    assert "\n" not in str(caught.value)


def test_wrong_arguments():
    with pytest.raises(mp.ArgumentError, match="rule 'middle' is unknown"):
        mp.mrope_positions([1], "qwen2_vl", rule="middle")
    with pytest.raises(mp.ArgumentError, match=r"expected \[L\]"):
        mp.mrope_positions([[1]], "qwen2_vl")
    with pytest.raises(mp.LayoutError, match="MM006"):
        mp.mrope_positions([1], "llava")
    video = [151656]
    for seconds in ([], [1.0, 2.0], [float("nan")], [-1.0]):
        with pytest.raises(mp.ArgumentError, match="second_per_grid_ts"):
            mp.mrope_positions(
                video, "qwen2_5_vl", video_grid_thw=[[1, 2, 2]], second_per_grid_ts=seconds
            )


def test_no_tokens():
    positions, delta = mp.mrope_positions([], get_family("qwen2_vl"))
    assert positions.shape == (3, 0)
    assert delta == 0
