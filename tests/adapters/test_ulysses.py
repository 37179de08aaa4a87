"""Rows of a pack over several processes, heads exchanged around attention: logprobs and gradients are one process's."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.models import logprobs_and_gradients, small_model, with_pixels
from support.ranks import here, logprob_bound, spawned
from support.samples import make_sample
from support.sequence import (
    assert_same,
    model_with_heads,
    split_logprobs_and_gradients,
)
from support.tiny_models import tiny_qwen2_5_vl
from torch import distributed

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.ulysses import heads
from mmpack.adapters.transformers.ulysses.heads import repeats
from mmpack.adapters.transformers.ulysses.media import share_media


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_are_one_process(tmp_path, on):
    spawned(check_two, 2, tmp_path, on=on)


def check_two(rank, ranks):
    group = distributed.group.WORLD
    model, samples = small_model("qwen2_5_vl").to(here()), mixed_batch("qwen2_5_vl")
    with attach(model):
        check_values(model, mp.pack(samples).to(here()), group)
        batch = mp.pack(samples, share_prefix=True).to(here())
        wanted = logprobs_and_gradients(model, batch)
        patches = batch.stats["patches_encoded"]
        with checkpointed(model):
            found = split_logprobs_and_gradients(model, batch, group, max_patches=24)
        assert_same(found, wanted, "shared, checkpointed")
        assert 0 < batch.stats["patches_encoded"] < patches  # each medium on one rank
        check_refusals(rank, model, batch, group)
        check_faults(model, batch, found[0], group)
        check_text_before_pictures(model, group)
    if here().type == "cpu":  # linear attention on a GPU rounds to TF32
        check_hybrid(group)


@contextlib.contextmanager
def checkpointed(model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield
    model.gradient_checkpointing_disable()
    model.eval()


@torch.no_grad()
def check_values(model, batch, group):
    """Logprobs and entropies of a plain pack, over two kept ids each."""
    count = len(batch.loss_targets)
    ids = torch.stack([batch.loss_targets, (batch.loss_targets + 7) % 151_643], 1).sort().values
    batch.kept_ids = mp.Support(2 * torch.arange(count + 1, device=ids.device), ids.flatten())
    wanted = packed_logprobs(model, batch, entropy=True, temperature=0.7)
    found = packed_logprobs(model, batch, entropy=True, temperature=0.7, sequence_group=group)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=logprob_bound())


def check_refusals(rank, model, batch, group):
    padded = mp.pad(mixed_batch("qwen2_5_vl")).to(here())
    with pytest.raises(mp.ModelError, match="a padded batch can't be split"):
        model_inputs(padded, model, sequence_group=group)
    with pytest.raises(mp.ArgumentError, match="sequence_group is of type str"):
        packed_logprobs(model, batch, sequence_group="sp")
    other = [make_sample([("text", [1, 2 + rank]), ("response", [3, 4])])]
    with pytest.raises(mp.ArgumentError, match="ranks 0 and 1 of sequence_group hold different"):
        packed_logprobs(model, mp.pack(other).to(here()), sequence_group=group)
    inputs = model_inputs(batch, model, sequence_group=group)
    del inputs["row_split"]
    with pytest.raises(mp.ModelError, match="visible_until has shape"):
        model.model(**inputs)


@torch.no_grad()
def check_faults(model, batch, right, group):
    """What the comparison must see: rows of other places, and heads of another rank."""
    own = heads.to_heads
    rows_swapped = lambda x, rows, group: own(x, rows, group).roll(rows[0], 0)  # noqa: E731
    heads_swapped = lambda x, rows, group: own(x.flip(1), rows, group)  # noqa: E731
    for fault in (rows_swapped, heads_swapped):
        heads.to_heads = fault
        try:
            found = packed_logprobs(model, batch, sequence_group=group)
        finally:
            heads.to_heads = own
        assert (found - right).abs().max() > 1e-3


def check_text_before_pictures(model, group):
    """A rank without a placeholder, and one without a loss token, which have the graph of the others."""
    parts = [
        ("text", range(5)), ("response", range(7)), ("text", range(30)),
        ("image", (1, 4, 6), "x"), ("text", [7, 8]),
    ]  # fmt: skip
    batch = mp.pack(with_pixels([make_sample(parts, "a")])).to(here())
    wanted = logprobs_and_gradients(model, batch)
    assert_same(split_logprobs_and_gradients(model, batch, group), wanted, "text, then pictures")


def check_hybrid(group):
    model = small_model("qwen3_5")
    with attach(model):
        batch = mp.pack(mixed_batch("qwen3_5"), share_prefix=True)
        wanted = logprobs_and_gradients(model, batch)
        found = split_logprobs_and_gradients(model, batch, group)
        assert_same(found, wanted, "hybrid")


def test_a_group_of_one_is_no_group(tmp_path):
    model, batch = tiny_qwen2_5_vl(), mp.pack(mixed_batch("qwen2_5_vl"))
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        with attach(model), torch.no_grad():
            found = packed_logprobs(model, batch, sequence_group=distributed.group.WORLD)
            assert torch.equal(found, packed_logprobs(model, batch))
    finally:
        distributed.destroy_process_group()


def test_heads_that_ranks_do_not_divide_are_repeated():
    assert [repeats(4, 12, n) for n in (1, 2, 4, 3, 6, 12)] == [1, 1, 1, 3, 3, 3]
    assert [repeats(2, 16, n) for n in (2, 4, 8, 16)] == [1, 2, 4, 8]
    with pytest.raises(mp.ModelError, match="12 heads, which 5 ranks"):
        repeats(4, 12, 5)


def test_media_are_shared_by_their_patches():
    owner = share_media([8, 40, 8, 8, 16], 2)
    assert owner[1] != owner[0] and np.bincount(owner, [8, 40, 8, 8, 16]).tolist() == [40, 40]
    assert share_media([5], 4).tolist() == [0] and share_media([], 2).tolist() == []


def test_models_that_can_not_be_split():
    from mmpack.adapters.transformers.ulysses.make import _refuse_unsplit

    model = model_with_heads("qwen2_5_vl", 6, 2)
    with pytest.raises(mp.ModelError, match="num_attention_heads is 6, which 4 ranks"):
        _refuse_unsplit(model, 4, "x")
    layer = SimpleNamespace(forward=None, _compiled_call_impl=True)
    compiled = SimpleNamespace(
        config=model.config, get_decoder=lambda: SimpleNamespace(layers=[layer])
    )
    with pytest.raises(mp.ModelError, match="layers are compiled"):
        _refuse_unsplit(compiled, 2, "x")
