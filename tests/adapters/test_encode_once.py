"""Features kept over passes, encoded once a step, and in chunks: as re-encoding each time, in every family."""

import contextlib
import copy

import pytest
import torch
from support.families import mixed_batch
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.live_bytes import LiveBytes
from support.models import (
    logprobs_and_gradients,
    relative_difference,
    small_model,
    smallest_qwen2_5_vl,
    weights_of,
    with_pixels,
)
from support.samples import make_sample
from transformers import Qwen2_5_VLForConditionalGeneration

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, encode_once, model_inputs, packed_logprobs
from mmpack.adapters.transformers.modules import tower_of
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.cache import FeatureStore
from mmpack.contracts import TOLERANCES
from mmpack.families import FAMILIES
from mmpack.versions import takes_encoded_media

PACKABLE = [name for name, family in FAMILIES.items() if family.packing == "yes"]


# one of patches, one with deepstack, one of tiles; all others are slow
KINDS = ("qwen2_5_vl", "qwen3_vl", "internvl")
EACH_KIND = [n if n in KINDS else pytest.param(n, marks=pytest.mark.slow) for n in PACKABLE]
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


RAN = {}  # tower -> one entry for each of its forwards


def note(tower, args):
    """One hook for all models: a store tells features by the tower's hooks."""
    RAN[tower].append(1)


@contextlib.contextmanager
def forwards(model):
    tower = tower_of(model.model)
    hook = tower.register_forward_pre_hook(note)
    try:
        yield RAN.setdefault(tower, [])
    finally:
        hook.remove()
        del RAN[tower]


def packs_of(samples, parts=((0, 1), (2, 3), (4,))):
    return [mp.pack([samples[i] for i in part], share_prefix=True) for part in parts]


def step(model, packs, features=None):
    """Weighted logprobs of the packs, forward and backward one after the other; the logprobs."""
    values = []
    for pack in packs:
        logprobs = packed_logprobs(model, pack, features=features)
        (logprobs * weights_of(pack)).sum().backward()
        values.append(logprobs.detach())
    return values


def gradients_of(model):
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def encoded_once(model, packs, **kwargs):
    with encode_once(model, packs, **kwargs) as features:
        values = step(model, packs, features)
    return values, gradients_of(model)


def close(found, wanted, off=1e-5):
    assert found.keys() == wanted.keys()
    assert all((found[n] - g).norm() <= off * g.norm() + 1e-8 for n, g in wanted.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EACH_KIND)
def test_a_store_gives_the_bits_of_encoding_again(models, name):
    model, samples = models(name), mixed_batch(name)
    batch = mp.pack(samples, share_prefix=True)
    freeze(model)
    try:
        with attach(model), forwards(model) as seen:
            wanted, gradients = logprobs_and_gradients(model, batch)
            again = len(seen)
            store = FeatureStore(2**30)
            with torch.no_grad():
                old = packed_logprobs(model, batch, features=store)
            assert batch.stats["patches_encoded"] == batch.stats["patches"]
            assert len(seen) == 2 * again
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


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND)
def test_encoded_once_with_one_backward_is_as_exact_as_each_sample_alone(models, name):
    model, samples = models(name), mixed_batch(name)
    (wanted, gradients), (_, separately) = exact(model, samples), separate(model, samples)
    packs = packs_of(samples)
    seeing = tower_of(model.model)
    backwards = []
    hook = next(seeing.parameters()).register_hook(backwards.append)
    with attach(model), forwards(model) as seen:
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
        patches = [m.num_patches for m in batch.media]
        for most in (40, sum(patches)):
            with forwards(model) as seen, torch.no_grad():
                packed_logprobs(model, batch, max_patches=most)
            assert batch.stats["patches_encoded"] == sum(patches)
            calls = len(seen)
            assert calls > 2 if most == 40 else calls <= 2
            with forwards(model) as seen:
                values, found = logprobs_and_gradients(model, batch, max_patches=most)
            # each is run again in the backward, where there are several
            assert len(seen) == calls * (2 if calls > 1 else 1)
            assert (values - wanted).abs().max() <= TOLERANCES["layouts"].value
            assert found.keys() == gradients.keys()
            assert relative_difference(found, gradients) <= 1e-5


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


def two_packs():
    return packs_of(two_prompts(), ((0, 1), (2, 3)))


def near(a, b):
    """Media that are encoded apart and together: CPUs' products have other bits for other numbers of rows."""
    return (a - b).abs().max() <= TOLERANCES["layouts"].value


# ---- a store, of a frozen tower -------------------------------------------------------------------------


def test_old_reference_and_policy_passes_encode_each_medium_once(attached):
    """Two epochs over two micro-batches, and a reference that is another model with the same tower."""
    reference = copy.deepcopy(attached)
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.5)
    packs, store = two_packs(), FeatureStore(2**20)
    optimizer = torch.optim.SGD([p for p in attached.parameters() if p.requires_grad], lr=0.1)
    with attach(reference), forwards(attached) as seen, forwards(reference):
        with torch.no_grad():
            for model in (attached, reference):
                for pack in packs:
                    kept = packed_logprobs(model, pack, features=store)
                    assert near(kept, packed_logprobs(model, pack))
        del seen[:]
        for _ in range(2):
            for pack in packs:
                optimizer.zero_grad()
                packed_logprobs(attached, pack, features=store).sum().backward()
                optimizer.step()
        assert not seen
        with torch.no_grad():
            kept = packed_logprobs(attached, packs[0], features=store)
            assert near(kept, packed_logprobs(attached, packs[0]))
    assert store.stats.misses == 2 and store.stats.patches_encoded == 24 + 32


def test_a_store_of_other_weights_or_of_a_trained_tower_is_refused(attached):
    """Also by inputs that are used again: they look at the store in each forward."""
    batch, store = mp.pack(two_prompts(), share_prefix=True), FeatureStore(2**20)
    inputs = model_inputs(batch, attached, features=store)
    assert store.stats.misses == 0
    with torch.no_grad():
        first = attached(**inputs).logits
        assert torch.equal(attached(**inputs).logits, first) and store.stats.hits == 2
    freeze(attached, False)
    with pytest.raises(mp.ModelError, match=r"the tower is being trained.*encode_once"):
        packed_logprobs(attached, batch, features=store)
    packed_logprobs(attached, batch).sum().backward()
    torch.optim.SGD(attached.parameters(), lr=0.1).step()
    with torch.no_grad():
        for use in (
            lambda: packed_logprobs(attached, batch, features=store),
            lambda: attached(**inputs),
        ):
            with pytest.raises(mp.ModelError, match=r"weights changed.*store.clear"):
                use()
        store.clear()
        values = packed_logprobs(attached, batch, features=store)
        assert torch.equal(values, packed_logprobs(attached, batch))


@pytest.mark.parametrize("targets", [["qkv", "q_proj"], ["q_proj"]])
def test_adapters_that_are_switched_off(targets):
    """Those of the tower have features of their own; those of the text model change none."""
    peft = pytest.importorskip("peft")
    base = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    batch, store, found = mp.pack(two_prompts(), share_prefix=True), FeatureStore(2**20), []
    with attach(model), torch.no_grad():
        for way in (contextlib.nullcontext(), model.disable_adapter()):  # a reference, in TRL
            with way:
                found.append(packed_logprobs(model, batch, features=store))
                assert torch.equal(found[-1], packed_logprobs(model, batch))
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert store.stats.misses == 2 * len(targets)


# ---- encode_once ----------------------------------------------------------------------------------------


@pytest.fixture
def trained():
    """A tiny model that is trained but for its embeddings, which cost the most."""
    model = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model.lm_head.requires_grad_(False)
    with attach(model):
        yield model


def losses_of(model, features, packs):
    return [(packed_logprobs(model, p, features=features) * weights_of(p)).sum() for p in packs]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "how", ["any order", "sum", "old logprobs", "text", "idle", "checkpointed"]
)
def test_the_gradients_of_a_step(trained, how):
    """In whatever order passes come, beside packs of text, and with layers that run again: those without the block."""
    packs = two_packs()
    if how == "idle":
        packs.append(mp.pack([make_sample([("text", [1, 2]), ("response", [3])])]))
    step(trained, packs)
    wanted = gradients_of(trained)
    if how == "checkpointed":
        detach(trained)
        trained.train().gradient_checkpointing_enable({"use_reentrant": False})
        attach(trained)
    with forwards(trained) as seen, encode_once(trained, packs) as features:
        if how in ("any order", "sum"):
            losses = losses_of(trained, features, packs)
            for loss in losses[::-1] if how == "any order" else [sum(losses)]:
                loss.backward()
        for pack in packs if how not in ("any order", "sum") else ():
            vision = "always" if how == "idle" else "auto"
            with torch.no_grad():
                old = packed_logprobs(trained, pack, features=features, vision=vision)
            lp = packed_logprobs(trained, pack, features=features, vision=vision)
            assert torch.equal(old, lp) and not old.requires_grad
            (lp * weights_of(pack)).sum().backward()
    assert len(seen) == 1  # layers run again, the tower doesn't
    close(gradients_of(trained), wanted)


def test_a_frozen_tower_is_encoded_and_that_is_all(attached):
    packs = two_packs()
    values = step(attached, packs)
    wanted = gradients_of(attached)
    with forwards(attached) as seen:
        again, found = encoded_once(attached, packs)
    assert len(seen) == 1 and found.keys() == wanted.keys()
    assert all(near(a, b) for a, b in zip(values, again, strict=True))


def test_chunks_that_run_again_have_the_attention_of_their_forward():
    """Also where the model is detached by then."""
    model = of_a_release_that_takes_features(smallest_qwen2_5_vl())
    model.lm_head.requires_grad_(False)
    packs, config, used = two_packs(), model.model.visual.config, []
    with attach(model):
        step(model, packs)
        wanted = gradients_of(model)
    hook = model.model.visual.blocks[0].attn.register_forward_pre_hook(
        lambda *_: used.append(config._attn_implementation)
    )
    with attach(model):
        losses = [(packed_logprobs(model, p, max_patches=1) * weights_of(p)).sum() for p in packs]
    sum(losses).backward()
    hook.remove()
    assert set(used) == {"mmpack_flash_tower"} and len(used) == 1 + 2 + 2
    assert config._attn_implementation == "sdpa"
    close(gradients_of(model), wanted)


def change_weights(model):
    next(tower_and_projector(model).parameters()).data.add_(1e-4)


def pass_over(model, features, packs):
    for loss in losses_of(model, features, packs):
        loss.backward()


def changed_between(model, features, packs):
    pass_over(model, features, packs[:1])
    change_weights(model)
    pass_over(model, features, packs[1:])


def changed_at_the_end(model, features, packs):
    pass_over(model, features, packs)
    change_weights(model)


def under_autocast(model, features, packs):
    with torch.autocast("cpu", torch.bfloat16):
        pass_over(model, features, packs)


def raising(model, features, packs):
    pass_over(model, features, packs[:1])
    raise KeyError("no wrong use")


@pytest.mark.parametrize(
    ("given", "block", "message"),
    [
        (2, lambda m, f, p: losses_of(m, f, p)[0].backward(), "1 of 2 forwards had a backward"),
        (2, lambda m, f, p: pass_over(m, f, p[:1]), "1 of 2 packs with media had a forward"),
        (1, pass_over, "1 of the pack's 2 media were not in the encoded packs"),
        (2, changed_between, "weights changed since media were.*Fix: step after"),
        (2, changed_at_the_end, "weights changed since media were.*Fix: step after"),
        (2, under_autocast, "autocast, precision, attention, hooks or adapters"),
        (2, raising, "no wrong use"),
    ],
)
def test_wrong_use_within_the_block_runs_no_backward_of_the_tower(trained, given, block, message):
    packs = two_packs()
    with (
        pytest.raises((mp.ModelError, KeyError), match=message),
        encode_once(trained, packs[:given]) as features,
    ):
        block(trained, features, packs)
    assert all(p.grad is None for p in tower_and_projector(trained).parameters())
    assert features._features == {} and features._sums == {}
    with pytest.raises(mp.ModelError, match=r"its block has ended.*Fix: run each pack's"):
        losses_of(trained, features, packs)


def test_what_is_refused(attached, monkeypatch):
    samples = two_prompts()
    batch, padded, store = mp.pack(samples), mp.pad(samples), FeatureStore(2**20)
    other = mp.pack([make_sample([("text", [1]), ("response", [2])], family="qwen2_vl")])
    for given, pack, error, match in (
        ({"features": store}, padded, mp.ModelError, r"padded batch.*Fix: pass mp.pack"),
        ({"max_patches": 8}, padded, mp.ModelError, r"padded batch.*Fix: pass mp.pack"),
        ({"features": {}}, batch, mp.ArgumentError, "features is of type dict"),
        ({"max_patches": 1.5}, batch, mp.ArgumentError, "max_patches is"),
    ):
        with pytest.raises(error, match=match):
            packed_logprobs(attached, pack, **given)
    for packs, error, match in (
        ([padded], mp.ArgumentError, r"packs has a PaddedBatch.*mp.pack"),
        (batch, mp.ArgumentError, r"packs is .*Fix: pass a list of batches"),
        ([other], mp.ModelError, "encode_once: the batch is of qwen2_vl"),
    ):
        with pytest.raises(error, match=match), encode_once(attached, packs):
            pass
    module = "mmpack.versions.takes_encoded_media"
    monkeypatch.setattr(module, lambda model: False)
    with pytest.raises(mp.ModelError, match=r"transformers \S+ takes no media.*Fix: .* 5.19"):
        packed_logprobs(attached, batch, max_patches=8)
    with pytest.raises(mp.ModelError, match=r"encode_once: .*5.19"), encode_once(attached, [batch]):
        pass


# ---- memory ---------------------------------------------------------------------------------------------


def long_pack():
    image = ("image", (1, 8, 8), "x")
    parts = [[("text", range(200)), image, ("response", range(k, k + 40))] for k in (0, 50)]
    return mp.pack(with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)]))


def test_without_gradients_no_activations_are_held():
    """The peak doesn't grow with the layers, nothing is saved, and what the pass made is gone after it."""
    peaks = {}
    for layers in (2, 8):
        config, batch = copy.deepcopy(smallest_qwen2_5_vl().config), long_pack()
        config.text_config.num_hidden_layers = layers
        config.text_config.layer_types = ["full_attention"] * layers
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
        for gradients in (False, True):
            with attach(model), torch.set_grad_enabled(gradients), LiveBytes() as live:
                values = packed_logprobs(model, batch)
                held = live.now
            peaks[layers, gradients] = live.peak
            assert gradients or held == values.nbytes
            del values
    assert peaks[8, False] <= 1.02 * peaks[2, False]
    assert peaks[8, True] > 2 * peaks[2, True] > 2 * peaks[2, False]


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
