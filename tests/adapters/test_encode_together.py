"""encode_together: a step's media encoded by all ranks, each once; loss and gradients of one process."""

import pytest
import torch
from support.models import needs_encoded_media, small_model, smallest_qwen2_5_vl, with_pixels
from support.ranks import assert_gradients, gradients_of, here, logprob_bound, spawned
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl
from support.unlike_ranks import frozen_words, loss_of, sharded, unlike_step, wrapped
from support.unlike_ranks import samples_of as unlike_samples
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.adapters.transformers import (
    attach,
    encode_once,
    encode_together,
    in_step,
    packed_logprobs,
)
from mmpack.adapters.transformers.modules import tower_of
from mmpack.families import get_family
from mmpack.planning.media import media_to_ranks

SIZES = [(1, 8, 8), (1, 4, 6), (1, 4, 4), (1, 8, 4), (1, 4, 4), (1, 6, 4)]


def samples_of(family):
    """By rank: nearly all pictures; one of them, too; text."""
    tile = get_family(family).pixel_layout == "tiles"
    sizes = [(2, 4, 4) if k % 2 else (1, 4, 4) for k in range(6)] if tile else SIZES

    def sample(name, *pictures):
        parts = [("text", [5, len(name)])]
        for k in pictures:
            parts += [("image", sizes[k], f"p{k}"), ("text", [7])]
        return make_sample([*parts, ("response", range(3))], name, family=family)

    first = [sample("a", 0, 1), sample("bb", 2), sample("ccc", 3, 4, 5), sample("dddd", 0)]
    return [with_pixels(first), with_pixels([sample("eeeee", 2), sample("ffffff")]), [sample("g")]]


def packs_of(samples):
    """Two micro-batches, or one."""
    return [mp.pack(part).to(here()) for part in (samples[:2], samples[2:]) if part]


def one_process(family, ranks, dtype=torch.float32):
    """Gradients of the mean over ranks, and the sum of the losses."""
    model, total = frozen_words(small_model(family)).to(here(), dtype), 0.0
    packs = [pack for own in samples_of(family)[:ranks] for pack in packs_of(own)]
    with attach(model), encode_once(model, packs) as features:
        for pack in packs:
            loss = loss_of(model, pack, features=features)
            (loss / ranks).backward()
            total += float(loss.detach())
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, total


CASES = [
    pytest.param("qwen3_vl", 3, marks=pytest.mark.slow),
    pytest.param("internvl", 2, marks=pytest.mark.slow),
]


@needs_encoded_media
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("family", "ranks"), CASES)
def test_ranks_are_one_process(tmp_path, family, ranks, on):
    spawned(run, ranks, tmp_path, family, on=on)


def run(rank, ranks, family):
    wanted, loss = one_process(family, ranks)
    for how in ("fsdp", "ddp", "frozen"):
        by_plan = how == "ddp"
        model = wrapped(family, how, ranks)
        rows = counted(model)
        packs, given = in_step(model, packs_of(samples_of(family)[rank])).packs, {}
        if by_plan:
            packs, given = planned(family, rank, ranks)
        with attach(model), encode_together(model, packs, **given) as features:
            encoded = sum(rows)
            total = run_packs(model, packs, features)
        assert_gradients(model, wanted, how)
        distributed.all_reduce(total)
        assert abs(float(total) - loss) <= 1e-5 * max(1, abs(loss)), how
        # each medium once, over all ranks, as evenly as its sizes allow; the packs ran no tower
        whole = {
            m.cache_key: m.num_patches
            for own in samples_of(family)[:ranks]
            for s in own
            for m in s.media
        }
        assert sum(features.patches) == sum(whole.values())
        assert max(features.patches) - min(features.patches) <= max(whole.values())
        assert max(features.patches) < sum(whole.values())
        assert encoded == sum(rows) == features.patches[rank], how
        assert all(pack.stats["patches_encoded"] == 0 for pack in packs)
    low_precision(rank, ranks, family, wanted)
    if ranks == 3:  # in the same processes, whose imports take longest
        unlike_step(rank, ranks, family, ("fsdp",))
    refused(rank, ranks, family)


def planned(family, rank, ranks):
    """The same samples by a plan of all ranks, without pixels; these lie in a store."""
    samples = [s for own in samples_of(family)[:ranks] for s in own]
    store = {m.cache_key: m.pixel_values for s in samples for m in s.media}
    for s in samples:
        for m in s.media:
            m.pixel_values = None
    plan = mp.plan(samples, max_tokens=200, max_samples=2, ranks=ranks)
    bins = [plan.bins[b] for b in plan.ranks[rank]]
    packs = [mp.pack([samples[i] for i in b]) if b else mp.idle_batch(family) for b in bins]
    return [pack.to(here()) for pack in packs], {"plan": plan, "samples": samples, "media": store}


def run_packs(model, packs, features):
    """Forward and backward of each; the sum of the losses."""
    total = torch.zeros((), device=here())
    for pack in packs:
        last = pack is packs[-1]
        if hasattr(model, "require_backward_grad_sync"):
            model.require_backward_grad_sync = last
        else:
            model.set_requires_gradient_sync(last)
        loss = loss_of(model, pack, features=features)
        loss.backward()
        total += loss.detach().float()
    return total


def counted(model):
    """The patches of each call of the tower, from now on; without those of the smallest medium."""
    whole, rows = getattr(model, "module", model), []

    def count(_, args, kwargs):
        given = args[0] if args else next(iter(kwargs.values()))
        patches = given.shape[0] * 16 if given.ndim == 4 else len(given)
        rows.append(0 if patches == 4 else patches)

    tower_of(whole.model).register_forward_pre_hook(count, with_kwargs=True)
    return rows


def low_precision(rank, ranks, family, exact):
    """bf16 is as far from fp32 as one process in bf16 is."""

    def off(found):
        return torch.stack([(found[n].float() - g).norm() for n, g in exact.items()]).norm()

    alone, _ = one_process(family, ranks, torch.bfloat16)
    model = sharded(frozen_words(small_model(family)).to(here(), torch.bfloat16), ranks)
    packs = in_step(model, packs_of(samples_of(family)[rank])).packs
    with attach(model), encode_together(model, packs) as features:
        run_packs(model, packs, features)
    assert off(gradients_of(model)) <= 1.5 * off(alone)


def refused(rank, ranks, family):
    model, packs = small_model(family).to(here()), packs_of(samples_of(family)[rank])
    plan = mp.plan([s for own in samples_of(family) for s in own], max_tokens=400, ranks=ranks + 1)
    for given, why in (
        ({"plan": plan}, "must be passed together"),
        ({"media": {}}, "must be passed together"),
        ({"plan": plan, "samples": []}, rf"plan is of {ranks + 1} ranks, the group has {ranks}"),
    ):
        with pytest.raises(mp.ArgumentError, match=why), encode_together(model, packs, **given):
            pass
    for pack in packs:
        for m in pack.media:
            m.pixel_values = None
    with (
        pytest.raises(mp.SchemaError, match=r"missing on all ranks"),
        encode_together(model, packs),
    ):
        pass
    with torch.no_grad(), attach(model):
        packs = packs_of(samples_of(family)[rank])
        with encode_together(model, packs) as features:
            for pack in packs:
                found = packed_logprobs(model, pack, features=features)
                assert (found - packed_logprobs(model, pack)).abs().max() <= logprob_bound()


def test_media_stay_at_home_where_they_can():
    patches, users = [64, 24, 16, 32, 16, 24], [[0], [0], [1], [0, 1], [1], [1]]
    for ranks in (1, 2, 3, 4):
        own = [[r for r in some if r < ranks] for some in users]
        found = media_to_ranks(patches, [n // 4 for n in patches], own, ranks)
        loads = [
            sum(n for n, r in zip(patches, found, strict=True) if r == k) for k in range(ranks)
        ]
        assert max(loads) <= max(64, -(-176 // ranks) + 16)
    assert media_to_ranks([8, 8], [2, 2], [[1], [0]], 2) == [1, 0]
    assert media_to_ranks([], [], [], 3) == []


def test_without_a_process_group(monkeypatch):
    model = tiny_qwen2_5_vl()
    with pytest.raises(mp.ArgumentError, match="no process group"), encode_together(model, []):
        pass


# ---- ranks with pictures, a video, text alone, and fewer packs or samples ----


@pytest.mark.slow
@needs_encoded_media
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_three_ranks_are_one_process(tmp_path, family, on):
    spawned(unlike_step, 3, tmp_path, family, ("fsdp", "ddp", "frozen"), on=on)


@pytest.mark.slow
@needs_encoded_media
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_loader_of_more_ranks_than_samples(tmp_path, on):
    """The mean of the global batch, whatever rank has how many samples, or none."""
    spawned(loaded, 4, tmp_path, on=on)


def policy_loss_of(model, batch, total_tokens, total_samples, scale=1.0):
    out = mp.policy_loss(
        packed_logprobs(model, batch),
        batch.loss_columns["advantages"],
        batch.cu_loss,
        total_tokens=total_tokens,
        total_samples=total_samples,
        scale=scale,
    )
    return out.loss


def loaded(rank, ranks):
    samples = [s for own in unlike_samples("qwen3_vl") for some in own for s in some][:5]
    columns = {"advantages": [0.5, -1.0, 2.0, 1.5, -0.5]}
    whole = frozen_words(small_model("qwen3_vl")).to(here())
    each = [
        torch.full((s.num_loss_tokens,), a)
        for s, a in zip(samples, columns["advantages"], strict=True)
    ]
    batch = mp.pack(samples, loss_columns={"advantages": each}).to(here())
    with attach(whole):
        expected = policy_loss_of(whole, batch, batch.num_loss_tokens, len(samples))
        expected.backward()
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    idle = torch.zeros((), device=here())
    for how in ("fsdp", "ddp"):
        model = wrapped("qwen3_vl", how, ranks)
        given = {"loss_columns": columns, "max_tokens": 200, "max_samples": 1}
        total = torch.zeros((), device=here())
        with PackLoader(samples, rank=rank, ranks=ranks, **given) as loader, attach(model):
            for step in loader:
                for batch in step:
                    batch = batch.to(here())
                    totals = step.total_tokens, step.total_samples
                    loss = policy_loss_of(model, batch, *totals, scale=ranks)
                    loss.backward()  # under DDP each one is reduced
                    total += loss.detach() / ranks
                    idle += not batch.sample_ids
        torch.distributed.all_reduce(total)
        assert abs(total - expected.detach()) <= 1e-6, how
        assert_gradients(model, wanted, how)
    torch.distributed.all_reduce(idle)
    assert idle == 2 * 3


# ---- kept features on two ranks ----


def batches():
    """Of each rank two: the first has a picture, and it with a video; the second has no media."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    both = [make_sample([*prompt, ("video", (2, 4, 4), "f"), ("response", range(5))], "f")]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    return [
        [mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(with_pixels(both))],
        [mp.pack(texts[:1]), mp.pack(texts[1:])],
    ]


def loss_of_once(model, batch, **kwargs):
    values = packed_logprobs(model, batch, **kwargs)
    return (values * torch.linspace(-1, 1, len(values))).sum()


def made():
    model = smallest_qwen2_5_vl()
    model.lm_head.requires_grad_(False)  # its gradient is what takes long
    return model


@pytest.mark.slow
@needs_encoded_media
def test_two_ranks(tmp_path):
    """Both in the same processes, whose imports take longest."""
    spawned(run_once, 2, tmp_path)


def run_once(rank, ranks):
    check_ddp(rank, ranks)
    check_fsdp(rank, ranks)


def check_ddp(rank, ranks):
    whole = made()
    with attach(whole):
        sum(loss_of_once(whole, b) / ranks for own in batches() for b in own).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    del whole
    packs = batches()[rank]
    for unused in (False, True):
        model = made()
        parallel = DistributedDataParallel(model, find_unused_parameters=unused)
        for each_reduces in (False, True):
            parallel.zero_grad()
            with attach(parallel), encode_once(parallel, packs) as features:
                parallel.require_backward_grad_sync = each_reduces
                loss_of_once(parallel, packs[0], features=features).backward()
                parallel.require_backward_grad_sync = True
                loss_of_once(parallel, packs[1], features=features).backward()
            for name, parameter in model.named_parameters():
                if name in wanted:
                    off = (parameter.grad - wanted[name]).norm()
                    assert off <= 1e-5 * wanted[name].norm() + 1e-7, (name, unused, each_reduces)


def check_fsdp(rank, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, packs = init_device_mesh("cpu", (ranks,)), batches()[0]
    model = made()
    for unit in (*model.model.language_model.layers, model.model.visual, model):
        fully_shard(unit, mesh=mesh)
    sharded = r"tower is sharded \(FSDP2.*wait forever.*Fix: leave features"
    with attach(model):
        with pytest.raises(mp.ModelError, match=sharded):
            packed_logprobs(model, packs[0], max_patches=8)
        with (
            pytest.raises(mp.ModelError, match=f"encode_once: .*{sharded}"),
            encode_once(model, packs),
        ):
            pass
