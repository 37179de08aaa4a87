"""Rows of a pack over several processes, heads exchanged around attention: logprobs and gradients are one process's."""

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.float64 import exact, separate
from support.heard import HEARING, some_samples
from support.kits import get_kit
from support.models import (
    logprobs_and_gradients,
    needs_encoded_media,
    relative_difference,
    small_model,
    weights_of,
    with_pixels,
)
from support.ranks import gradient_bound, gradients_of, here, logprob_bound, spawned
from support.samples import make_sample
from support.sequence import (
    assert_same,
    model_with_heads,
    split_logprobs_and_gradients,
)
from support.tiny_models import tiny_qwen2_5_vl
from support.unlike_ranks import frozen_words
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    in_step,
    model_inputs,
    packed_logprobs,
    record_routes,
)
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.adapters.transformers.ulysses import heads
from mmpack.adapters.transformers.ulysses.heads import repeats
from mmpack.adapters.transformers.ulysses.media import share_media

ON = pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@needs_encoded_media
@ON
def test_two_ranks_are_one_process(tmp_path, on):
    spawned(check_two, 2, tmp_path, on=on)


def check_two(rank, ranks):
    group = distributed.group.WORLD
    model, samples = small_model("qwen2_5_vl").to(here()), mixed_batch("qwen2_5_vl")
    samples = samples[::2] + samples[1::2]  # branches of one prompt apart: rows in another order
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
    batch.kept_ids = mp.ops.Support(2 * torch.arange(count + 1, device=ids.device), ids.flatten())
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
    parts = [("text", range(5)), ("response", range(7)), ("text", range(30))]
    parts += [("image", (1, 4, 6), "x"), ("text", [7, 8])]
    batch = mp.pack(with_pixels([make_sample(parts, "a")])).to(here())
    wanted = logprobs_and_gradients(model, batch)
    assert_same(split_logprobs_and_gradients(model, batch, group), wanted, "text, then pictures")


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


def test_heads_and_media_are_shared_out():
    assert [repeats(4, 12, n) for n in (1, 2, 4, 3, 6, 12)] == [1, 1, 1, 3, 3, 3]
    assert [repeats(2, 16, n) for n in (2, 4, 8, 16)] == [1, 2, 4, 8]
    with pytest.raises(mp.ModelError, match="12 heads, which 5 ranks"):
        repeats(4, 12, 5)
    patches = [8, 40, 8, 8, 16]
    assert np.bincount(share_media(patches, 2), patches).tolist() == [40, 40]
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


# ---- families -------------------------------------------------------------------------------------------

# experts, linear attention, tiles, windows with two-way blocks, latent attention, sound
KINDS = ["qwen3_vl_moe", "qwen3_5", "internvl", "gemma4", "kimi_k25", "qwen2_5_omni"]


@pytest.mark.adapter
@pytest.mark.slow
@ON
def test_families_on_two_ranks(tmp_path, on):
    """Text, pictures, a video, sound; some samples share a prompt."""
    names = [name for name in KINDS if get_kit(name).available]
    if on == "cuda":  # linear attention there rounds to TF32
        names.remove("qwen3_5")
    spawned(check_families, 2, tmp_path, names, on=on)


def check_families(rank, ranks, names):
    for name in names:
        samples = some_samples(name) if name in HEARING else mixed_batch(name)
        check(small_model(name).to(here()), samples, name)
    if "qwen3_vl_moe" in names:
        check_routes(small_model("qwen3_vl_moe").to(here()), mixed_batch("qwen3_vl_moe"))


def check_routes(model, samples):
    """Experts that another forward took are replayed row by row."""
    batch = mp.pack(samples).to(here())
    with attach(model), torch.no_grad():
        with record_routes(model) as routes:
            packed_logprobs(model, mp.pack(samples).to(here()))
        batch.routed_experts = routes.rows.flip(0).contiguous()
        wanted = packed_logprobs(model, batch)
        found = packed_logprobs(model, batch, sequence_group=distributed.group.WORLD)
    torch.testing.assert_close(found, wanted, rtol=0, atol=logprob_bound())


@pytest.mark.slow
@ON
def test_heads_that_ranks_do_not_divide(tmp_path, on):
    spawned(check_heads, 3, tmp_path, on=on)


def check_heads(rank, ranks):
    """Four key heads are repeated for three ranks."""
    check(model_with_heads("qwen3_vl", 12, 4).to(here()), mixed_batch("qwen3_vl"), ranks)


def check(model, samples, where):
    batch = mp.pack(samples, share_prefix=True).to(here())
    with attach(model):
        wanted = logprobs_and_gradients(model, batch)
        found = split_logprobs_and_gradients(model, batch, distributed.group.WORLD)
    host = copy.deepcopy(model).cpu()
    assert_same(found, wanted, where, lambda: (separate(host, samples)[1], exact(host, samples)[1]))


# ---- packs of two ranks each ----


NAME = "qwen2_5_vl"
CLIPS = "kimi_k25"  # whose tower averages frames, a call for each length
SOUNDS = "qwen3_omni_moe"  # whose audio tower has a call for each length


def batches():
    """Of each data rank: one with pictures and shared rows, then one of text; one of text only."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    more = make_sample([("text", range(4)), ("response", range(5))], "c")
    first = mp.pack(with_pixels(pictures), share_prefix=True)
    own = [first, mp.pack([more])], [mp.pack(texts)]
    return [[batch.to(here()) for batch in of_rank] for of_rank in own]


@pytest.mark.slow
@needs_encoded_media
@ON
def test_a_mesh_of_two_by_two_is_one_process(tmp_path, on):
    spawned(check_mesh, 4, tmp_path, on=on)


def check_mesh(rank, ranks):
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("dp", "sp"))
    whole = small_model(NAME).to(here())
    with attach(whole):
        for batch in (batch for own in batches() for batch in own):
            (packed_logprobs(whole, batch) * weights_of(batch)).sum().backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for wrap in (data_parallel, sharded):
        model = small_model(NAME).to(here()).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(model, mesh)
        own = batches()[mesh.get_local_rank("dp")]
        step = in_step(model, own, group=mesh["dp"].get_group())
        assert len(step.packs) == 2  # of one rank an idle one, of fewer rows than ranks
        assert step.total_tokens == 3 + 4 + 5 + 9 + 9
        with attach(model):
            for batch in step.packs:
                logprobs = packed_logprobs(model, batch, sequence_group=mesh["sp"].get_group())
                loss = (logprobs * weights_of(batch)).sum()
                (loss * ranks).backward()  # gradients are averaged over all of them
        check_gradients(model, wanted, wrap.__name__)


def check_gradients(model, wanted, where):
    found = gradients_of(model)
    error = relative_difference({name: found[name] for name in wanted}, wanted)
    assert error <= gradient_bound(), (where, error)


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def sharded(model, mesh):
    """Parameters over the ranks of a sequence, copies of them over data ranks."""
    for unit in (*decoder_layers(model), *tower_blocks(model), model):
        fully_shard(unit, mesh=mesh)
    return model


@pytest.mark.slow
@needs_encoded_media
@ON
@pytest.mark.parametrize("name", [CLIPS, SOUNDS])
def test_sharded_towers_run_as_often_on_both_ranks(tmp_path, name, on):
    """Clips or sounds of unlike lengths, of which each rank has others: unlike numbers of calls."""
    spawned(check_towers, 2, tmp_path, name, on=on)


def check_towers(rank, ranks, name):
    samples = some_samples(name) if name == SOUNDS else clips()
    batch = mp.pack(samples, share_prefix=True).to(here())
    whole = frozen_words(small_model(name)).to(here())
    with attach(whole):
        values, wanted = logprobs_and_gradients(whole, batch)
    model = frozen_words(small_model(name)).to(here())
    heard = model.model.audio_tower.layers if name == SOUNDS else []
    for unit in (*decoder_layers(model), *tower_blocks(model), *heard, model):
        fully_shard(unit, mesh=init_device_mesh(here().type, (ranks,)))
    with attach(model):
        group = torch.distributed.group.WORLD
        logprobs = packed_logprobs(model, batch, sequence_group=group)
        ((logprobs * weights_of(batch)).sum() * ranks).backward()
    torch.testing.assert_close(logprobs, values, rtol=0, atol=logprob_bound())
    check_gradients(model, wanted, name)


def clips():
    parts = [("text", range(5))]
    for name, frames in (("f", 2), ("g", 5), ("h", 2)):
        parts += [("video", (frames, 4, 4), name), ("response", range(3))]
    return with_pixels([make_sample(parts, "v", family=CLIPS)])
