"""Features kept over passes, encoded once a step, and in chunks: as re-encoding each time, in every family."""

import copy
import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from support.families import mixed_batch
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.live_bytes import LiveBytes
from support.models import (
    logprobs_and_gradients,
    small_model,
    smallest_qwen2_5_vl,
    weights_of,
    with_pixels,
)
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, encode_once, model_inputs, packed_logprobs
from mmpack.adapters.transformers.parts import switched
from mmpack.adapters.transformers.tower import takes_encoded_media, tower_and_projector
from mmpack.cache import FeatureStore
from mmpack.contracts import TOLERANCES
from mmpack.families import FAMILIES

PACKABLE = [name for name, family in FAMILIES.items() if family.packing == "yes"]


def fast(*names):
    """All families; the others take minutes."""
    slow = pytest.mark.slow
    return [n if n in names else pytest.param(n, marks=slow) for n in PACKABLE]


# one of patches, one with deepstack, one of tiles
EACH_KIND = fast("qwen2_5_vl", "qwen3_vl", "internvl")
pytestmark = pytest.mark.adapter


def of_a_release_that_takes_features(model):
    if not takes_encoded_media(model):
        pytest.skip("transformers before 5.19")
    return model


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = small_model(name)
        return of_a_release_that_takes_features(made[name])

    return get


@pytest.fixture
def attached():
    """A tiny model whose tower is frozen."""
    model = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model.lm_head.requires_grad_(False)
    freeze(model)
    with attach(model):
        yield model


def freeze(model, frozen=True):
    for parameter in tower_and_projector(model).parameters():
        parameter.requires_grad_(not frozen)


class Forwards:
    """Patches, or frames where it takes those, of each forward of the tower. One hook for all models."""

    of: ClassVar[dict[Any, list[int]]] = {}

    def __init__(self, model):
        self.tower = self.tower_of(model)
        self.hook = self.tower.register_forward_pre_hook(Forwards.note, with_kwargs=True)

    @staticmethod
    def tower_of(model):
        core = model.model
        return core.visual if hasattr(core, "visual") else core.vision_tower

    @staticmethod
    def note(module, args, kwargs):
        given = [*args, *kwargs.values()]
        Forwards.of[module].append(max(len(x) for x in given if torch.is_tensor(x)))

    def __enter__(self):
        return Forwards.of.setdefault(self.tower, [])

    def __exit__(self, *error):
        self.hook.remove()
        Forwards.of.pop(self.tower, None)


def patches_seen(seen, batch):
    """Patches of each forward: of whole media, in their order."""
    if batch.family_of().pixel_layout in ("patches", "squares"):
        return list(seen)
    media, rows = iter(batch.media), []
    for frames in seen:
        rows.append(0)
        while frames > 0:
            t, h, w = next(media).grid_thw
            frames, rows[-1] = frames - t, rows[-1] + t * h * w
        assert frames == 0
    return rows


def packs_of(samples, parts=((0, 1), (2, 3), (4,))):
    return [mp.pack([samples[i] for i in part], share_prefix=True) for part in parts]


def summed(model, packs, **kwargs):
    """Gradients of the packs' weighted logprobs, added up; and the logprobs."""
    model.zero_grad(set_to_none=True)
    values = []
    for pack in packs:
        logprobs = packed_logprobs(model, pack, **kwargs)
        (logprobs * weights_of(pack)).sum().backward()
        values.append(logprobs.detach())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return values, gradients


def encoded_once(model, packs, **kwargs):
    model.zero_grad(set_to_none=True)
    values = []
    with encode_once(model, packs, **kwargs) as features:
        for pack in packs:
            logprobs = packed_logprobs(model, pack, features=features)
            (logprobs * weights_of(pack)).sum().backward()
            values.append(logprobs.detach())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return values, gradients


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EACH_KIND)
def test_a_store_gives_the_bits_of_encoding_again(models, name):
    model, samples = models(name), mixed_batch(name)
    batch = mp.pack(samples, share_prefix=True)
    freeze(model)
    try:
        with attach(model), Forwards(model) as seen:
            wanted, gradients = logprobs_and_gradients(model, batch)
            again = len(seen)
            store = FeatureStore(2**30)
            with torch.no_grad():
                old = packed_logprobs(model, batch, features=store)
            assert batch.stats["patches_encoded"] == batch.stats["patches"]
            assert seen[again:] == seen[:again]
            for _ in range(2):
                values, found = logprobs_and_gradients(model, batch, features=store)
                assert torch.equal(values, wanted) and torch.equal(old, wanted)
                assert found.keys() == gradients.keys()
                assert all(torch.equal(found[n], gradients[n]) for n in found)
                assert batch.stats["patches_encoded"] == 0
            assert len(seen) == 2 * again
    finally:
        freeze(model, False)
    assert store.stats.misses == len(batch.media) and store.stats.hits == 2 * len(batch.media)
    assert store.stats.patches_saved == 2 * store.stats.patches_encoded


@pytest.mark.few(1)
@pytest.mark.parametrize("name", fast("qwen3_vl", "internvl"))
def test_encoded_once_with_one_backward_is_as_exact_as_each_sample_alone(models, name):
    model, samples = models(name), mixed_batch(name)
    (wanted, gradients), (_, separately) = exact(model, samples), separate(model, samples)
    packs = packs_of(samples)
    seeing = Forwards.tower_of(model)
    backwards = []
    hook = next(seeing.parameters()).register_hook(backwards.append)
    with attach(model), Forwards(model) as seen:
        values, found = encoded_once(model, packs)
        # a tower of patches reads images and videos alike
        alone = FAMILIES[name].pixel_layout != "patches"
        assert len(seen) == (len({m.modality for p in packs for m in p.media}) if alone else 1)
        assert len(backwards) == 1
        assert all(pack.stats["patches_encoded"] == 0 for pack in packs)
        assert (torch.cat(values) - wanted).abs().max() <= TOLERANCES["layouts"].value
        assert_as_exact_as_separate(found, separately, gradients, name)
        values, found = encoded_once(model, packs, max_patches=24)
        assert (torch.cat(values) - wanted).abs().max() <= TOLERANCES["layouts"].value
        assert_as_exact_as_separate(found, separately, gradients, f"{name} in chunks")
    hook.remove()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EACH_KIND)
def test_chunks_of_whole_media_give_the_same(models, name):
    model, samples = models(name), mixed_batch(name)
    batch = mp.pack(samples, share_prefix=True)
    with attach(model):
        wanted, gradients = logprobs_and_gradients(model, batch)
        counts = [m.grid_thw[0] * m.grid_thw[1] * m.grid_thw[2] for m in batch.media]
        for most in (1, 40, max(counts), sum(counts)):
            with Forwards(model) as seen, torch.no_grad():
                values = packed_logprobs(model, batch, max_patches=most)
            rows = patches_seen(seen, batch)
            assert sum(rows) == sum(counts) == batch.stats["patches_encoded"]
            assert all(n <= most or n in counts for n in rows)
            assert (values - wanted).abs().max() <= TOLERANCES["layouts"].value
            with Forwards(model) as seen:
                values, found = logprobs_and_gradients(model, batch, max_patches=most)
            # each is run again in the backward, where there are several
            assert len(seen) == len(rows) * (2 if len(rows) > 1 else 1)
            assert (values - wanted).abs().max() <= TOLERANCES["layouts"].value
            off = sum((found[n] - gradients[n]).square().sum() for n in gradients)
            whole = sum(g.square().sum() for g in gradients.values())
            assert found.keys() == gradients.keys() and (off / whole).sqrt() <= 1e-5


def two_prompts():
    """Two packs that share a picture; two samples each."""
    image, other = ("image", (1, 4, 6), "x"), ("image", (1, 8, 4), "y")
    parts = [
        [("text", [1]), image, ("response", [2, 3])],
        [("text", [1]), image, ("response", [5, 6, 7])],
        [("text", [8]), other, image, ("response", [4])],
        [("text", [8]), other, ("response", [9, 10])],
    ]
    return with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)])


def near(a, b):
    """Media that are encoded apart and together: CPUs' products have other bits for other numbers of rows."""
    return (a - b).abs().max() <= TOLERANCES["layouts"].value


def test_old_reference_and_policy_passes_encode_each_medium_once(attached):
    """Two epochs over two micro-batches, and a reference that is another model with the same tower."""
    reference = copy.deepcopy(attached)
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.5)
    packs, store = packs_of(two_prompts(), ((0, 1), (2, 3))), FeatureStore(2**20)
    optimizer = torch.optim.SGD([p for p in attached.parameters() if p.requires_grad], lr=0.1)
    with attach(reference), Forwards(attached) as seen, Forwards(reference) as also:
        with torch.no_grad():
            for pack in packs:
                old = packed_logprobs(attached, pack, features=store)
                ref = packed_logprobs(reference, pack, features=store)
                assert near(old, packed_logprobs(attached, pack))
                assert near(ref, packed_logprobs(reference, pack))
        del seen[:], also[:]
        for _ in range(2):
            for pack in packs:
                optimizer.zero_grad()
                lp = packed_logprobs(attached, pack, features=store)
                lp.sum().backward()
                optimizer.step()
                with torch.no_grad():
                    assert near(
                        packed_logprobs(attached, pack, features=store),
                        packed_logprobs(attached, pack),
                    )
    assert not also and len(seen) == 4  # those without the store
    assert store.stats.misses == 2 and store.stats.patches_encoded == 24 + 32


def test_a_trained_tower_s_step_makes_the_store_stale(attached):
    batch, store = mp.pack(two_prompts(), share_prefix=True), FeatureStore(2**20)
    freeze(attached, False)
    with torch.no_grad():
        packed_logprobs(attached, batch, features=store)
    with pytest.raises(mp.ModelError, match=r"the tower is being trained.*encode_once"):
        packed_logprobs(attached, batch, features=store)
    packed_logprobs(attached, batch).sum().backward()
    torch.optim.SGD(attached.parameters(), lr=0.1).step()
    with torch.no_grad():
        with pytest.raises(mp.ModelError, match=r"weights changed.*store.clear"):
            packed_logprobs(attached, batch, features=store)
        store.clear()
        values = packed_logprobs(attached, batch, features=store)
        assert torch.equal(values, packed_logprobs(attached, batch))


def test_inputs_that_are_used_again_look_at_the_store_in_each_forward(attached):
    batch, store = mp.pack(two_prompts()), FeatureStore(2**20)
    inputs = model_inputs(batch, attached, features=store)
    assert store.stats.misses == 0
    with torch.no_grad():
        first = attached(**inputs).logits
        assert torch.equal(attached(**inputs).logits, first) and store.stats.hits == 2
        next(tower_and_projector(attached).parameters()).data.mul_(1.5)
        with pytest.raises(mp.ModelError, match="weights changed"):
            attached(**inputs)


def test_another_attention_of_the_tower_has_features_of_its_own(attached):
    batch, store = mp.pack(two_prompts()), FeatureStore(2**20)
    with torch.no_grad():
        packed_logprobs(attached, batch, features=store)
        with switched([attached.model.visual.config], "eager"):
            packed_logprobs(attached, batch, features=store)
    assert store.stats.misses == 4 and store.stats.hits == 0


@pytest.mark.parametrize("change", ["disabled", "scaled", "merged", "trained"])
def test_adapters_of_the_tower(change):
    peft = pytest.importorskip("peft")
    base = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["qkv", "q_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    batch, store = mp.pack(two_prompts(), share_prefix=True), FeatureStore(2**20)
    with attach(model), torch.no_grad():
        on = packed_logprobs(model, batch, features=store)
        assert torch.equal(on, packed_logprobs(model, batch))
        if change == "disabled":  # a reference, in TRL
            with model.disable_adapter():
                off = packed_logprobs(model, batch, features=store)
                assert torch.equal(off, packed_logprobs(model, batch))
            assert (on - off).abs().max() > 1e-3
        elif change == "scaled":
            for module in model.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling["default"] *= 2
            assert torch.equal(
                packed_logprobs(model, batch, features=store), packed_logprobs(model, batch)
            )
        elif change == "merged":
            model.merge_adapter()
            with pytest.raises(mp.ModelError, match="weights changed"):
                packed_logprobs(model, batch, features=store)
            model.unmerge_adapter()
        else:
            with (
                torch.enable_grad(),
                pytest.raises(mp.ModelError, match="the tower is being trained"),
            ):
                packed_logprobs(model, batch, features=store)
    assert store.stats.misses == 2 * (2 if change in ("disabled", "scaled") else 1)


def test_adapters_of_the_text_alone_leave_the_tower_frozen():
    peft = pytest.importorskip("peft")
    base = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
    batch, store = mp.pack(two_prompts(), share_prefix=True), FeatureStore(2**20)
    with attach(model):
        packed_logprobs(model, batch, features=store).sum().backward()
        with torch.no_grad(), model.disable_adapter():
            packed_logprobs(model, batch, features=store)
    assert store.stats.misses == store.stats.hits == 2


def test_dropout_of_the_tower_is_refused(attached):
    attached.train()
    attached.model.visual.blocks[0].attn.attention_dropout = 0.1
    with pytest.raises(mp.ModelError, match=r"blocks.0.attn of the tower.*dropout"):
        packed_logprobs(attached, mp.pack(two_prompts()), features=FeatureStore(2**20))


@pytest.fixture
def trained():
    """A tiny model that is trained but for its embeddings, which cost the most."""
    model = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model.lm_head.requires_grad_(False)
    with attach(model):
        yield model


def packs_and_loss(model, features, packs):
    return [packed_logprobs(model, p, features=features).sum() for p in packs]


def test_forwards_before_backwards_and_in_any_order(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    _, wanted = encoded_once(trained, packs)
    with encode_once(trained, packs) as features:
        losses = [
            (packed_logprobs(trained, p, features=features) * weights_of(p)).sum() for p in packs
        ]
        losses[1].backward()
        losses[0].backward()
    found = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    assert all((found[n] - g).norm() <= 1e-6 * g.norm() + 1e-9 for n, g in wanted.items())


def test_one_backward_of_the_sum_is_one_backward_each(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    _, wanted = encoded_once(trained, packs)
    with encode_once(trained, packs) as features:
        sum(
            (packed_logprobs(trained, p, features=features) * weights_of(p)).sum() for p in packs
        ).backward()
    found = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    assert all((found[n] - g).norm() <= 1e-6 * g.norm() + 1e-9 for n, g in wanted.items())


def test_logprobs_without_gradients_within_the_block(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    _, wanted = encoded_once(trained, packs)
    with Forwards(trained) as seen, encode_once(trained, packs) as features:
        for pack in packs:
            with torch.no_grad():
                old = packed_logprobs(trained, pack, features=features)
            lp = packed_logprobs(trained, pack, features=features)
            assert torch.equal(old, lp) and not old.requires_grad
            (lp * weights_of(pack)).sum().backward()
    assert len(seen) == 1
    found = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    assert all(torch.equal(found[n], g) for n, g in wanted.items())


def test_gradient_checkpointing_of_text_and_tower(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    _, wanted = encoded_once(trained, packs)
    detach(trained)
    trained.train().gradient_checkpointing_enable({"use_reentrant": False})
    with attach(trained):
        for most in (None, 24):
            with Forwards(trained) as seen:
                _, found = encoded_once(trained, packs, max_patches=most)
            assert len(seen) == (1 if most is None else 2)  # layers run again, the tower doesn't
            assert all((found[n] - g).norm() <= 1e-5 * g.norm() + 1e-8 for n, g in wanted.items())


def test_a_chunk_that_runs_again_has_the_attention_of_its_forward(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    config = trained.model.visual.config
    used = []
    layer = trained.model.visual.blocks[0].attn
    hook = layer.register_forward_pre_hook(lambda *_: used.append(config._attn_implementation))
    with switched([config], "eager"):
        losses = [packed_logprobs(trained, p, max_patches=1).sum() for p in packs]
    with switched([config], "sdpa"):
        losses[1].backward()
        assert config._attn_implementation == "sdpa"
    hook.remove()
    assert used == ["eager"] * 5


def test_chunks_that_run_again_after_detach():
    model = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model.lm_head.requires_grad_(False)
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    with attach(model):
        _, wanted = summed(model, packs)
    with attach(model):
        losses = [(packed_logprobs(model, p, max_patches=1) * weights_of(p)).sum() for p in packs]
    sum(losses).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    assert all((found[n] - g).norm() <= 1e-5 * g.norm() + 1e-8 for n, g in wanted.items())


def test_a_forgotten_backward_is_an_error(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    with (
        pytest.raises(mp.ModelError, match=r"1 of 2 forwards had a backward.*Fix: "),
        encode_once(trained, packs) as features,
    ):
        packs_and_loss(trained, features, packs)[0].backward()
    with (
        pytest.raises(mp.ModelError, match=r"1 of 2 packs with media had a forward.*Fix: "),
        encode_once(trained, packs) as features,
    ):
        packs_and_loss(trained, features, packs[:1])[0].backward()
    assert all(p.grad is None for p in tower_and_projector(trained).parameters())


def test_media_that_were_not_given_are_an_error(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    with (
        pytest.raises(
            mp.ModelError, match=r"1 of the pack's 2 media were not in the encoded packs.*Fix"
        ),
        encode_once(trained, packs[:1]) as features,
    ):
        packs_and_loss(trained, features, packs)


def test_a_block_that_was_left_says_so(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    with encode_once(trained, packs) as features:
        torch.stack(packs_and_loss(trained, features, packs)).sum().backward()
    with pytest.raises(
        mp.ModelError, match=r"its block has ended.*Fix: run each pack's forward and backward"
    ):
        packs_and_loss(trained, features, packs)


@pytest.mark.parametrize("when", ["before the next pass", "before the end"])
def test_weights_that_change_within_are_an_error(trained, when):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    with (
        pytest.raises(mp.ModelError, match=r"weights changed since media were.*Fix: step after"),
        encode_once(trained, packs) as features,
    ):
        for pack in packs:
            packed_logprobs(trained, pack, features=features).sum().backward()
            if when == "before the next pass" or pack is packs[-1]:
                next(tower_and_projector(trained).parameters()).data.add_(1e-4)


def test_an_error_in_the_block_passes_and_runs_no_backward(trained):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    with pytest.raises(KeyError), encode_once(trained, packs) as features:
        packs_and_loss(trained, features, packs)[0].backward()
        raise KeyError
    assert all(p.grad is None for p in tower_and_projector(trained).parameters())
    assert features._features == {} and features._sums == {}


def test_another_model_or_another_state_is_an_error(trained):
    packs, other = packs_of(two_prompts(), ((0, 1), (2, 3))), smallest_qwen2_5_vl()
    with (
        pytest.raises(mp.ModelError, match="of another model"),
        encode_once(trained, []) as nothing,
        attach(other),
        torch.no_grad(),
    ):
        packed_logprobs(other, packs[0], features=nothing)
    with (
        pytest.raises(mp.ModelError, match="autocast, precision, attention, hooks or adapters"),
        encode_once(trained, packs) as features,
        torch.autocast("cpu", torch.bfloat16),
    ):
        packed_logprobs(trained, packs[0], features=features)


def test_a_frozen_tower_is_encoded_and_that_is_all(attached):
    packs = packs_of(two_prompts(), ((0, 1), (2, 3)))
    values, wanted = summed(attached, packs)
    with Forwards(attached) as seen:
        again, found = encoded_once(attached, packs)
    assert len(seen) == 1 and found.keys() == wanted.keys()
    for a, b in zip(values, again, strict=True):
        assert (a - b).abs().max() <= TOLERANCES["layouts"].value


def test_packs_without_media_take_part(trained):
    text = mp.pack([make_sample([("text", [1, 2]), ("response", [3])])])
    packs = [*packs_of(two_prompts(), ((0, 1), (2, 3))), text]
    _, wanted = summed(trained, packs)
    for vision in ("auto", "always"):
        trained.zero_grad(set_to_none=True)
        with Forwards(trained) as seen, encode_once(trained, packs) as features:
            for pack in packs:
                lp = packed_logprobs(trained, pack, vision=vision, features=features)
                (lp * weights_of(pack)).sum().backward()
        assert len(seen) == 1
        found = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        assert all((found[n] - g).norm() <= 1e-5 * g.norm() + 1e-8 for n, g in wanted.items())
    with encode_once(trained, [text]) as features:
        packed_logprobs(trained, text, features=features).sum().backward()


def test_what_is_refused(attached, monkeypatch):
    samples = two_prompts()
    batch, padded, store = mp.pack(samples), mp.pad(samples), FeatureStore(2**20)
    for given in ({"features": store}, {"max_patches": 8}):
        with pytest.raises(mp.ModelError, match=r"padded batch.*Fix: pass mp.pack"):
            packed_logprobs(attached, padded, **given)
    with pytest.raises(
        mp.ArgumentError, match=r"features is of type dict.*Fix: pass a FeatureStore"
    ):
        packed_logprobs(attached, batch, features={})
    for wrong in (0, 1.5):
        with pytest.raises(mp.ArgumentError, match="max_patches is"):
            packed_logprobs(attached, batch, max_patches=wrong)
    with (
        pytest.raises(mp.ArgumentError, match=r"packs has a PaddedBatch.*mp.pack"),
        encode_once(attached, [padded]),
    ):
        pass
    for wrong in (batch, None):
        with (
            pytest.raises(mp.ArgumentError, match=r"packs is .*Fix: pass a list of batches"),
            encode_once(attached, wrong),
        ):
            pass
    with pytest.raises(mp.ModelError, match="encode_once: the batch is of qwen2_vl"):
        other = mp.pack([make_sample([("text", [1]), ("response", [2])], family="qwen2_vl")])
        with encode_once(attached, [other]):
            pass
    module = "mmpack.adapters.transformers.inputs.takes_encoded_media"
    monkeypatch.setattr(module, lambda model: False)
    for given in ({"features": store}, {"max_patches": 8}):
        with pytest.raises(mp.ModelError, match=r"transformers \S+ takes no media.*Fix: .* 5.19"):
            packed_logprobs(attached, batch, **given)
    with pytest.raises(mp.ModelError, match=r"encode_once: .*5.19"), encode_once(attached, [batch]):
        pass


def test_older_transformers_refuse_by_version():
    model = smallest_qwen2_5_vl()
    if takes_encoded_media(model):
        pytest.skip("transformers 5.19 or newer")
    batch = mp.pack(two_prompts())
    with attach(model):
        for given in ({"features": FeatureStore(1)}, {"max_patches": 8}):
            with pytest.raises(mp.ModelError, match=r"transformers 5\.\S+ takes no media.*5\.19"):
                packed_logprobs(model, batch, **given)


def text_of(layers):
    model = smallest_qwen2_5_vl()
    config = copy.deepcopy(model.config)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    return type(model)(config).eval()


def long_pack():
    image = ("image", (1, 8, 8), "x")
    parts = [[("text", range(200)), image, ("response", range(k, k + 40))] for k in (0, 50)]
    return mp.pack(with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)]))


def test_without_gradients_no_activations_are_held():
    """The peak doesn't grow with the layers, nothing is saved, and what the pass made is gone after it."""
    peaks = {}
    for layers in (2, 8):
        model, batch = text_of(layers), long_pack()
        for gradients in (False, True):
            saved = []

            def note(x, saved=saved):
                saved.append(x.nbytes)
                return x

            with attach(model), torch.set_grad_enabled(gradients), LiveBytes() as live:
                with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                    values = packed_logprobs(model, batch)
                held = live.now
            peaks[layers, gradients] = live.peak
            assert bool(saved) == gradients
            if not gradients:
                assert held == values.nbytes
            del values
    assert peaks[8, False] <= 1.02 * peaks[2, False]
    assert peaks[8, True] > 2 * peaks[2, True] > 2 * peaks[2, False]


def test_features_and_inputs_are_let_go(monkeypatch):
    model, batch = smallest_qwen2_5_vl(), long_pack()
    made = []
    forward = model.model.visual.forward

    def noted(*args, **kwargs):
        out = forward(*args, **kwargs)
        made.append(weakref.ref(out.pooler_output))
        return out

    monkeypatch.setattr(model.model.visual, "forward", noted)
    gc.disable()  # by counting alone: no cycle keeps a pack's features for a while
    try:
        with attach(model), torch.no_grad():
            packed_logprobs(model, batch)
        assert made and all(x() is None for x in made)
    finally:
        gc.enable()


def test_chunks_bound_what_the_tower_holds(trained):
    """Eight pictures: in chunks of one, between forward and backward, about their features are held."""
    parts = [[("text", [k]), ("image", (1, 8, 8), f"m{k}"), ("response", [1, 2])] for k in range(8)]
    batch = mp.pack(with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)]))

    def held(**kwargs):
        with LiveBytes() as live:
            made = model_inputs(batch, trained, **kwargs)["input_ids"].make()
        assert made
        return live.now, live.peak

    whole, in_chunks = held(), held(max_patches=64)
    assert in_chunks[0] < whole[0] / 5 and in_chunks[1] < whole[1] / 2


def test_one_cache_key_of_two_grids(attached):
    """Packs that hold them apart: in one pack MM109 says so."""
    packs = []
    for grid in ((1, 4, 8), (1, 8, 4)):
        parts = [("text", range(3)), ("image", grid, "x"), ("response", range(5, 9))]
        samples = with_pixels([make_sample(parts, "s", family="qwen2_5_vl")])
        samples[0].media[0].cache_key = "not a digest"
        packs.append(mp.pack(samples))
    store = FeatureStore(2**20)
    with torch.no_grad(), encode_once(attached, packs) as features:
        for pack in packs:
            wanted = packed_logprobs(attached, pack)
            for kept in (store, features):
                assert near(packed_logprobs(attached, pack, features=kept), wanted)
    assert store.stats.misses == 2


def test_another_layer_of_the_tower_has_features_of_its_own(models):
    """InternVL's config says which; no module of the tower does."""
    model, store = models("internvl"), FeatureStore(2**20)
    parts = [("text", range(3)), ("image", (1, 4, 4), "x"), ("response", range(5, 9))]
    batch = mp.pack(with_pixels([make_sample(parts, "s", family="internvl")]))
    layer = model.config.vision_feature_layer
    try:
        with attach(model), torch.no_grad():
            for model.config.vision_feature_layer in (-1, -2):
                wanted = packed_logprobs(model, batch)
                assert torch.equal(packed_logprobs(model, batch, features=store), wanted)
    finally:
        model.config.vision_feature_layer = layer
    assert store.stats.misses == 2
