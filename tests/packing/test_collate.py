"""collate in DataLoader workers, pinned batches, accelerate's shards, reprs: against `pack` and torch's own."""

import functools

import pytest
import torch
from support.batch_tensors import assert_same, tensors
from support.models import with_pixels
from support.samples import make_sample
from torch.utils.data import DataLoader

import mmpack as mp
from mmpack.errors import SchemaError


def some_samples(count=6):
    return with_pixels(
        [
            make_sample(
                [
                    ("text", [1, 2, 3]),
                    ("image", (1, 4, 4), f"picture-{i // 3}"),
                    ("response", list(range(10 + i, 14 + 2 * i))),
                ],
                f"s{i}",
                f"g{i // 3}",
                rollout_logprobs=torch.full((4 + i,), -0.5).numpy(),
            )
            for i in range(count)
        ]
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [False, True])
def test_a_loader_gives_what_pack_gives(workers, share):
    samples = some_samples()
    plan = mp.plan(samples, max_tokens=60 if not share else 38, share_prefix=share)
    assert len(plan.bins) > 1
    loader = DataLoader(
        samples,
        batch_sampler=plan.bins,
        collate_fn=functools.partial(mp.collate, share_prefix=share, pad_to_multiple_of=8),
        num_workers=workers,
    )
    for batch, members in zip(loader, plan.bins, strict=True):
        expected = mp.pack([samples[i] for i in members], None, share, 8)
        assert_same(batch, expected)
        batch.attention_plan.check(batch.visible_until)


def test_columns():
    samples = some_samples(3)
    items = [
        (s, {"advantages": a, "ref_logprobs": torch.arange(float(s.num_loss_tokens))})
        for s, a in zip(samples, (0.5, torch.tensor(-1.0), 2), strict=True)
    ]
    batch = mp.collate(items)
    expected = torch.tensor([0.5] * 4 + [-1.0] * 5 + [2.0] * 6)
    assert torch.equal(batch.loss_columns["advantages"].float(), expected)
    assert batch.loss_columns["ref_logprobs"].tolist() == [*range(4), *range(5), *range(6)]
    assert "rollout_logprobs" in batch.loss_columns
    nothing = make_sample([("text", [1, 2])])
    assert mp.collate([(nothing, {"advantages": 1.0})]).loss_columns["advantages"].shape == (0,)


# ---------------------------------------------------------------- pinned memory


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_on_a_gpu(workers):
    samples = some_samples()
    loader = DataLoader(
        samples, batch_sampler=[[0, 1, 2], [3, 4, 5]], collate_fn=mp.collate, pin_memory=True,
        num_workers=workers,
    )  # fmt: skip
    for batch, members in zip(loader, ([0, 1, 2], [3, 4, 5]), strict=True):
        assert [n for n, x in tensors(batch) if x.numel() and not x.is_pinned()] == []
        moved = batch.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert_same(moved.to("cpu"), mp.pack([samples[i] for i in members]))


# ---------------------------------------------------------------- accelerate


def test_accelerate_gives_each_rank_its_bins():
    accelerate = pytest.importorskip("accelerate")
    samples = some_samples()
    plan = mp.plan(samples, max_tokens=60, ranks=2)
    order = [plan.bins[b] for step in zip(*plan.ranks, strict=True) for b in step]
    loader = DataLoader(samples, batch_sampler=order, collate_fn=mp.collate)
    for rank in range(2):
        mine = accelerate.data_loader.prepare_data_loader(
            loader,
            device=torch.device("cpu"),
            num_processes=2,
            process_index=rank,
            put_on_device=True,
            even_batches=False,
        )
        found = [batch.sample_ids for batch in mine]
        assert found == [[samples[i].sample_id for i in plan.bins[b]] for b in plan.ranks[rank]]


@pytest.mark.parametrize("on_invalid", ["raise", "drop"])
def test_one_number_for_a_malformed_sample(on_invalid):
    good, bad = some_samples(2)
    bad.loss_spans = None
    items = [(good, {"x": 1.0}), (bad, {"x": 2.0})]
    if on_invalid == "raise":
        with pytest.raises(SchemaError, match="loss_spans"):
            mp.collate(items)
    else:
        assert mp.collate(items, on_invalid="drop").loss_columns["x"].tolist() == [1.0] * 4


# ---------------------------------------------------------------- reprs


def test_reprs_are_short():
    samples = some_samples()
    assert repr(mp.pack(samples, pad_to_multiple_of=8)) == (
        "PackedBatch('qwen2_5_vl', samples=6, loss_tokens=39, media=2, input_ids=[96], "
        "pixel_values=[32, 1176], loss_columns['rollout_logprobs']=[39], device='cpu')"
    )
    plan = mp.plan(samples, max_tokens=38, share_prefix=True)
    assert repr(plan) == (
        "Plan(bins=2, ranks=1, samples=6, loss_tokens=39, dropped=0, fill=0.750, balance=1.000)"
    )
    assert plan.bin_rows == [
        mp.pack([samples[i] for i in b], None, True).num_tokens for b in plan.bins
    ]
    assert plan.bin_patches == [16, 16]
