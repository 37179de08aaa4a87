"""The vision tower under mmpack's attention: features and gradients of its own, one window after the other."""

import copy
import inspect
import pickle

import pytest
import torch
from support.families import LAYOUTS, mixed_batch, some_slow
from support.float64 import Wide, wide_copy
from support.models import (
    logprobs_and_gradients,
    relative_difference,
    small_model,
    smallest_qwen2_5_vl,
)
from support.tiny_models import tiny_model
from support.towers import CASES, encode, media_of, relative
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, is_attached, model_inputs, packed_logprobs
from mmpack.adapters.transformers import tower_attention as adapter
from mmpack.adapters.transformers.attention import attach_in_forwards
from mmpack.adapters.transformers.tower_attention import NAME, TOWER, tower_of
from mmpack.contracts import TOLERANCES, parameter_gradient_fp32_bound
from mmpack.families import FAMILIES
from mmpack.ops.attention import SEQUENCES, plan_sequences

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = model = small_model(name)
            with torch.no_grad():  # attention far from uniform
                for parameter in tower_of(model.model).parameters():
                    if parameter.ndim == 2:
                        parameter.mul_(4)
        return made[name]

    return get


@pytest.mark.parametrize(("family", "grids"), CASES)
def test_features_and_gradients_are_those_of_one_by_one(models, family, grids):
    model, (modality, media) = models(family), media_of(family, grids)
    own, own_gradients = encode(model, modality, media)
    wide = wide_copy(model)
    with Wide():
        exact, exact_gradients = encode(wide, modality, media)
    assert exact[0].dtype == torch.float64
    with attach(model, text=False):
        levels, gradients = encode(model, modality, media)
    for found, apart, wanted in zip(levels, own, exact, strict=True):
        assert relative(found, wanted) <= max(1.5 * relative(apart, wanted), 1e-6)
    assert gradients.keys() == own_gradients.keys() == exact_gradients.keys()
    for kind in ("pixels", "parameters"):
        of = [
            {n: g for n, g in set_.items() if (n == "pixels") == (kind == "pixels")}
            for set_ in (gradients, own_gradients, exact_gradients)
        ]
        off, apart = (relative_difference(x, of[2]) for x in of[:2])
        assert off <= parameter_gradient_fp32_bound(apart), (kind, off, apart)


def test_the_comparison_can_see_a_wrong_window(models, monkeypatch):
    model, (modality, media) = models("qwen2_5_vl"), media_of("qwen2_5_vl", "one picture")
    own, _ = encode(model, modality, media)
    attend = adapter.sequence_attention

    def everywhere(q, k, v, plan, **options):
        return attend(q, k, v, plan_sequences([plan.rows]), **options)

    monkeypatch.setattr(adapter, "sequence_attention", everywhere)
    with attach(model, text=False):
        levels, _ = encode(model, modality, media)
    assert relative(levels[0], own[0]) > 1e-2


@pytest.mark.parametrize(("family", "grids"), [c for c in CASES if c[0] != "internvl"])
def test_sequences_are_those_of_the_towers_own_forward(models, family, grids, monkeypatch):
    """What transformers itself makes of the grids, layer by layer; each plan is made once."""
    model, (modality, media) = models(family), media_of(family, grids)
    monkeypatch.setattr(adapter, "TAKES_KNOWN", False)
    made, asked = [], []
    attend = adapter.sequence_attention

    def planned(lengths):
        made.append(plan_sequences(lengths))
        return made[-1]

    def attended(q, k, v, plan, **options):
        asked.append(plan.cu_seqlens)
        return attend(q, k, v, plan, **options)

    monkeypatch.setattr(adapter, "plan_sequences", planned)
    monkeypatch.setattr(adapter, "sequence_attention", attended)
    layers = []

    def remember(module, args, kwargs):
        layers.append(kwargs["cu_seqlens"])

    blocks = tower_of(model.model).blocks
    hooks = [b.register_forward_pre_hook(remember, with_kwargs=True) for b in blocks]
    with attach(model, text=False), torch.no_grad():
        make = (
            model.model.get_image_features
            if modality == "image"
            else model.model.get_video_features
        )
        make(**media)
    for hook in hooks:
        hook.remove()
    assert len(layers) == len(asked) == len(blocks)
    assert all(torch.equal(a, b) for a, b in zip(layers, asked, strict=True))
    assert len(made) == (2 if family == "qwen2_5_vl" else 1)


@pytest.mark.skipif(
    not adapter.TAKES_KNOWN, reason="this transformers' towers make all by themselves"
)
@pytest.mark.parametrize(("family", "grids"), [c for c in CASES if c[0] != "internvl"])
def test_what_the_tower_is_told_is_what_it_makes(models, family, grids, monkeypatch):
    model, (modality, media) = models(family), media_of(family, grids)
    with attach(model, text=False):
        told, gradients = encode(model, modality, media)
        monkeypatch.setattr(adapter, "TAKES_KNOWN", False)
        untold, expected = encode(model, modality, media)
        monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(told, untold, strict=True))
    assert relative_difference(gradients, expected) == 0

    def hide(tower, args, kwargs):
        return args, kwargs | {"grid_thw": kwargs["grid_thw"].to("meta")}

    with attach(model, text=False):
        hook = tower_of(model.model).register_forward_pre_hook(hide, with_kwargs=True)
        try:
            blind, _ = encode(model, modality, media)  # nobody can read the grids
        finally:
            hook.remove()
    assert torch.equal(blind[0], told[0])


@pytest.mark.skipif(
    not adapter.TAKES_KNOWN, reason="this transformers' towers make all by themselves"
)
def test_offsets_that_the_caller_gives_are_obeyed(models):
    """Frames in two halves, each of which sees itself alone."""
    model = models("qwen2_vl")
    _, media = media_of("qwen2_vl", "one picture")
    given = {"cu_seqlens": torch.tensor([0, 128, 256], dtype=torch.int32), "max_seqlen": 128}
    with torch.no_grad():
        own = model.model.get_image_features(**media, **given).last_hidden_state
        with attach(model, text=False):
            found = model.model.get_image_features(**media, **given).last_hidden_state
            whole = model.model.get_image_features(**media).last_hidden_state
    assert relative(found, own) <= 1e-6 < 1e-2 < relative(whole, own)


@pytest.mark.parametrize("family", some_slow(FAMILIES))
def test_padded_batches_and_generate_are_the_models_own(models, family):
    """With text=False: masks, caches and the tokens that are generated stay."""
    model, samples = models(family), mixed_batch(family)
    batch = LAYOUTS["left"](samples)
    inputs = model_inputs(mp.pad(samples[:1]), model)
    inputs.pop("use_cache")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 151643}
    takes = inspect.signature(model.forward).parameters
    if "mm_token_type_ids" in takes and "mm_token_type_ids" not in inputs:
        options["mm_token_type_ids"] = token_types(model, inputs["input_ids"])
    with torch.no_grad():
        wanted = packed_logprobs(model, batch)
        tokens = model.generate(**inputs, **options)
        with attach(model, text=False):
            assert not is_attached(model) and TOWER.is_attached(tower_of(model.model))
            found = packed_logprobs(model, batch)
            assert torch.equal(model.generate(**inputs, **options), tokens)
            with pytest.raises(mp.ModelError, match="the model's attention ignores visible_until"):
                packed_logprobs(model, mp.pack(samples))
    assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value
    assert tower_of(model.model).config._attn_implementation != NAME


def token_types(model, ids):
    return (ids == model.config.image_token_id).long() + 2 * (
        ids == getattr(model.config, "video_token_id", -1)
    ).long()


def names(model):
    return model.config.get_text_config()._attn_implementation, tower_of(
        model.model
    ).config._attn_implementation


def test_text_and_tower_are_attached_and_put_back_each_by_itself():
    model = smallest_qwen2_5_vl()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    own = names(model)
    assert own == ("sdpa", "eager")
    with attach(model, text=False):
        assert names(model) == ("sdpa", NAME)
        with attach(model):
            assert names(model) == ("mmpack", NAME)
            with attach(model, tower="keep"):
                assert names(model) == ("mmpack", NAME)
        assert names(model) == ("sdpa", NAME)
    assert names(model) == own
    with attach(model, tower="keep"):
        assert names(model) == ("mmpack", "eager")
        with attach(model, text=False):
            assert names(model) == ("mmpack", NAME)
        assert names(model) == ("mmpack", "eager")
    attach(model)
    detach(model)
    assert names(model) == own


def test_wrong_arguments():
    model = smallest_qwen2_5_vl()
    with pytest.raises(
        mp.ArgumentError, match=r"attach: tower is 'sdpa'. Fix: use 'auto' or 'keep'"
    ):
        attach(model, tower="sdpa")
    with pytest.raises(mp.ArgumentError, match="attach: text is of type str"):
        attach(model, text="no")
    with pytest.raises(mp.ArgumentError, match="leave nothing to attach"):
        attach(model, text=False, tower="keep")
    assert names(model) == ("sdpa", "sdpa")


def test_where_one_part_cannot_be_attached_neither_is():
    model = smallest_qwen2_5_vl()
    other = type(model)(copy.deepcopy(model.config))
    other.model.visual = type(model.model.visual)(model.config.vision_config)
    with attach(model, text=False):
        with pytest.raises(mp.ModelError, match="shares its config with another model"):
            attach(other)
        assert not is_attached(other)
    with attach(other):
        assert is_attached(other)


def test_an_attention_that_is_set_while_attached_stays():
    model = smallest_qwen2_5_vl()
    attach(model)
    tower = tower_of(model.model)
    tower.set_attn_implementation("eager")
    with pytest.raises(mp.ModelError, match=r"the vision tower's attention was changed.*Fix: "):
        attach(model)
    with pytest.raises(mp.ModelError, match="the vision tower's attention was changed"):
        detach(model)
    assert names(model) == ("sdpa", "eager")
    with attach(model):
        assert names(model) == ("mmpack", NAME)
    assert names(model) == ("sdpa", "eager")


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies(how):
    model = smallest_qwen2_5_vl()
    modality, media = media_of("qwen2_5_vl", "pictures that windows don't divide")
    own, _ = encode(model, modality, media)
    with attach(model):
        other = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
        attached, _ = encode(model, modality, media)
    assert TOWER.is_attached(tower_of(other.model)) == (how == "pickled")
    found, _ = encode(other, modality, media)
    assert torch.equal(found[0], own[0] if how == "copied" else attached[0])
    detach(other)
    assert names(other) == ("sdpa", "sdpa")
    assert torch.equal(encode(other, modality, media)[0][0], own[0])
    with attach(other):
        assert torch.equal(encode(other, modality, media)[0][0], attached[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_backward_after_detach_under_checkpointing(reentrant, own, monkeypatch):
    """What is run again is the attention of the forward: it is asked for once more per layer, and no other."""
    modality, media = media_of("qwen2_5_vl", "pictures that windows don't divide")
    model = smallest_qwen2_5_vl().train()
    with attach(model, text=False):
        _, expected = encode(model, modality, media)
    model.set_attn_implementation({"vision_config": own})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    asked = []
    attend = adapter.sequence_attention

    def attended(*operands, **options):
        asked.append(1)
        return attend(*operands, **options)

    monkeypatch.setattr(adapter, "sequence_attention", attended)
    tower = tower_of(model.model)
    pixels = media["pixel_values"].clone().requires_grad_()
    with attach(model, text=False):
        out = model.model.get_image_features(pixels, media["image_grid_thw"], return_dict=True)
    assert names(model)[1] == own and len(asked) == len(tower.blocks)
    features = torch.cat(tuple(out.pooler_output))
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    (features * torch.randn(features.shape)).sum().backward()
    assert len(asked) == 2 * len(tower.blocks) and names(model)[1] == own
    found = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
    assert relative_difference({"pixels": pixels.grad} | found, expected) <= 1e-6


def test_a_users_own_checkpoint_does_not_pass_silently():
    """It runs the tower's own attention after detach: the same numbers, or an error of torch's."""
    modality, media = media_of("qwen2_5_vl", "one picture")
    model = smallest_qwen2_5_vl().train()
    _, expected = encode(model, modality, media)
    tower = tower_of(model.model)
    for block in tower.blocks:
        own = block.forward
        block.forward = lambda hidden, own=own, **kw: checkpoint(
            lambda h: own(h, **kw), hidden, use_reentrant=True
        )
    pixels = media["pixel_values"].clone().requires_grad_()
    with attach(model, text=False):
        out = model.model.get_image_features(pixels, media["image_grid_thw"], return_dict=True)
    features = torch.cat(tuple(out.pooler_output))
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    (features * torch.randn(features.shape)).sum().backward()
    assert relative(pixels.grad, expected["pixels"]) <= 1e-5


def test_whole_steps_with_and_without_the_tower(models):
    """Logprobs and gradients of a shared pack, tower kept and attached, once with checkpointing."""
    model = models("qwen2_5_vl")
    batch = mp.pack(mixed_batch("qwen2_5_vl"), share_prefix=True)
    with attach(model, tower="keep"):
        wanted, gradients = logprobs_and_gradients(model, batch)
    with attach(model):
        found, others = logprobs_and_gradients(model, batch)
        model.train().gradient_checkpointing_enable()
        try:
            again, checkpointed = logprobs_and_gradients(model, batch)
        finally:
            model.eval().gradient_checkpointing_disable()
    assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value
    assert torch.equal(found, again)
    assert relative_difference(others, gradients) <= 1e-5
    assert relative_difference(checkpointed, others) <= 1e-6


def test_the_same_bits_every_time(models):
    model, (modality, media) = models("qwen2_5_vl"), media_of("qwen2_5_vl", "videos")
    torch.use_deterministic_algorithms(True)
    try:
        with attach(model, text=False):
            (first, one), (second, other) = (encode(model, modality, media) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first[0], second[0]) and relative_difference(one, other) == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_forced_backend_that_cannot_run_is_an_error(models, family, monkeypatch):
    model, (modality, media) = models(family), media_of(family, "one picture")
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", "varlen")
    encode(model, modality, media)  # its own attention is not asked
    with attach(model, text=False):
        with pytest.raises(
            mp.BackendError, match="tower attention: varlen was requested, but varl"
        ):
            encode(model, modality, media)
        monkeypatch.setenv("MMPACK_TOWER_ATTENTION", "sdpa")
        encode(model, modality, media)


def test_a_mask_is_an_error():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(mp.ModelError, match="an attention_mask was passed"):
        adapter.tower_attention(torch.nn.Module(), q, q, q, torch.zeros(1, 1, 4, 4))


def test_only_in_forwards_of_mmpack():
    model = smallest_qwen2_5_vl()
    attach_in_forwards(model)
    samples = mixed_batch("qwen2_5_vl")
    seen = []
    hook = model.model.visual.register_forward_pre_hook(lambda *_: seen.append(names(model)))
    packed, padded = mp.pack(samples), mp.pad(samples)
    from mmpack.adapters.transformers import SampleCollator

    with torch.no_grad():
        model(**{k: v for k, v in SampleCollator(model)(samples).items() if "labels" not in k})
        assert packed.visible_until is not None and set(seen) == {("mmpack", NAME)}
        seen.clear()
        model(**model_inputs(padded, model))
    hook.remove()
    assert set(seen) == {("sdpa", "sdpa")} == {names(model)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"],
)
def test_blocks_compile_whole(family):
    model = tiny_model(family)
    cases = [media_of(family, g) for g in ("one picture", "pictures that windows don't divide")]
    with attach(model, text=False):
        expected = [encode(model, *case) for case in cases]
        torch._dynamo.reset()
        for layer in tower_of(model.model).blocks:
            layer.compile(backend="eager", fullgraph=True)
        for case, (levels, gradients) in zip(cases, expected, strict=True):
            found, others = encode(model, *case)
            assert relative(found[0], levels[0]) <= 1e-6
            assert relative_difference(others, gradients) <= 1e-6


def test_tiles_compile_whole():
    """Not a layer of InternVL's: transformers' own hooks on it can't be traced."""
    attend = torch.compile(adapter.tower_attention, backend="eager", fullgraph=True)
    for lines in (3, 5):
        q, k, v = torch.randn(3, lines, 2, 17, 16)
        out, _ = attend(torch.nn.Module(), q, k, v, None, scaling=0.25)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25)
        assert relative(out, expected.transpose(1, 2)) <= 1e-6


def test_packs_of_other_sizes_do_not_compile_again():
    """Once for frames and once for windows, then for any size of both."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    attend = torch.compile(adapter.tower_attention, backend=counter, fullgraph=True)
    counts = []
    for pictures, patches in ((2, 256), (1, 1024), (3, 640), (4, 320), (2, 192), (5, 448)):
        frames, windows = [patches] * pictures, [64] * (pictures * patches // 64)
        plans = adapter.TowerPlans(plan_sequences(frames), plan_sequences(windows))
        for plan in plans:
            plan.choice = {torch.float32: "sdpa"}
            plan.chosen_under = SEQUENCES.settings(16, 0.0)
            q, k, v = torch.randn(3, 1, 2, plan.rows, 16)
            options = {"cu_seq_lens_q": plan.cu_seqlens.clone(), "tower_plans": plans}
            attend(torch.nn.Module(), q, k, v, None, scaling=0.25, **options)
        counts.append(counter.frame_count)
    assert counts[0] == 2 and counts[2:] == [counts[2]] * 4 and counts[2] <= 6
