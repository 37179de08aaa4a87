"""PackLoader over ranks: a step of too few samples, and what each batch knows of the towers elsewhere."""

import pytest
import torch
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.families import get_family
from mmpack.packing.calls import Counts, calls_of, counts_of


@pytest.mark.parametrize(("ranks", "count"), [(2, 3), (4, 2)])
def test_ranks_get_as_many_batches_some_of_them_idle(ranks, count):
    picture, video = ("image", (1, 4, 6), "x"), ("video", (2, 4, 4), "f")
    parts = [
        [picture, ("text", [7])],
        [("text", [3]), video],
        [("text", range(4))],
        [picture, video],
        [("text", range(6))],
    ]
    samples = with_pixels(
        [make_sample([*p, ("response", range(3))], f"s{k}") for k, p in enumerate(parts)]
    )
    columns = {"advantages": [float(k) for k in range(5)], "old": [torch.ones(3)] * 5}
    options = {"loss_columns": columns, "max_tokens": 60, "max_samples": 1, "ranks": ranks}
    found = []
    for rank in range(ranks):
        [(step, batches)] = [(s, list(s)) for s in PackLoader(samples, rank=rank, **options)]
        assert (step.total_tokens, step.total_samples) == (15, 5)
        found.append(batches)
    assert [len(batches) for batches in found] == [count] * ranks
    every = [batch for batches in found for batch in batches]
    assert sorted(name for b in every for name in b.sample_ids) == [f"s{k}" for k in range(5)]
    assert sum(not b.sample_ids for b in every) == ranks * count - 5 > 0
    for batch in every:
        dtypes = {name: x.dtype for name, x in batch.loss_columns.items()}
        assert dtypes == {"advantages": torch.float64, "old": torch.float32}
    # the plan knows of each micro-batch what its packs would say together
    for own in zip(*found, strict=True):
        counts = [counts_of(calls_of(b.family_of(), b.media)) for b in own]
        most = Counts(max(c.vision for c in counts), 0)
        assert {b.tower_runs for b in own} == {most} == {own[0].to("cpu").tower_runs}


def test_images_and_videos_take_one_call_where_a_tower_reads_both():
    def runs(family, *modalities):
        shapes = {"image": (1, 4, 4), "video": (6, 4, 4)}
        media = [
            mp.Medium(str(k), m, str(k), shapes[m], num_tokens=4) for k, m in enumerate(modalities)
        ]
        return counts_of(calls_of(get_family(family), media))

    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"):
        assert runs(family, "image", "video", "image") == (1, 0)
    assert runs("gemma4", "image", "video") == (2, 0)
    # its tower averages four frames, and reads pieces of four and of two apart
    assert runs("kimi_k25", "image", "video") == (3, 0)
    assert runs("qwen3_vl") == (0, 0)
