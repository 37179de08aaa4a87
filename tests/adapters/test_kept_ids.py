"""Logprobs over kept ids from a model, through packs: beside its own logits in float64, and its own sampler."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from support.families import LAYOUTS, mixed_batch
from support.kept_ids import values
from support.models import logprobs_and_gradients, relative_difference, small_model, weights_of
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    model_inputs,
    packed_logprobs,
    prefix_logprobs,
    rollout,
)
from mmpack.adapters.transformers.prefix import kv_bytes_per_token
from mmpack.cache import PrefixIndex, RowStore
from mmpack.contracts import TOLERANCES
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.losses.policy.loss import VARIANTS
from mmpack.versions import takes_encoded_media

pytestmark = pytest.mark.adapter

CLOSE = TOLERANCES["layouts"].value
WARM = 0.7
# a random model is flat: at a tenth of the temperature top-p leaves few ids
SAMPLER = {"temperature": 0.1, "top_p": 0.8, "top_k": 1024, "min_p": 0.01}


@pytest.fixture(scope="module")
def model():
    return small_model("qwen2_5_vl")


@pytest.fixture(scope="module")
def samples():
    """The mixed batch, each loss token with its own list of 1 to 40 ids."""
    rng = np.random.default_rng(0)
    out = []
    for sample in mixed_batch("qwen2_5_vl"):
        targets = sample.input_ids[sample.loss_indices]
        lists = [[t, *rng.choice(151_643, rng.integers(0, 40), replace=False)] for t in targets]
        kept = mp.schema.Ragged.of([sorted(set(map(int, ids))) for ids in lists])
        out.append(dataclasses.replace(sample, kept_ids=kept))
        assert mp.validate(out[-1]) == []
    return out


def of_all_logits(model, batch, temperature=WARM):
    """Logprobs and entropies [N] over each list, of logits [T, V] of every row, by torch's softmax in float64."""
    logits = model(**model_inputs(batch, model)).logits.flatten(0, 1)[batch.loss_rows.long()]
    return values(logits.double() / temperature, batch.loss_targets, batch.kept_ids)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_all_logits_cut_to_the_lists(model, samples, layout):
    batch = LAYOUTS[layout](samples)
    with attach(model):
        lp, gradients = logprobs_and_gradients(model, batch, temperature=WARM)
        both = packed_logprobs(model, batch, WARM, entropy=True, memory_budget=2**24)
        wanted = of_all_logits(model, batch)
        (wanted[0] * weights_of(batch)).sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    for own, full in zip((lp, *both), (wanted[0], *wanted), strict=True):
        assert (own - full).abs().max() <= CLOSE
    assert relative_difference(gradients, expected) <= 1e-5


def test_the_whole_vocabulary_is_asked_for_by_name(model, samples):
    with attach(model), torch.no_grad():
        batch = mp.pack(samples, share_prefix=True)
        without = mp.pack([dataclasses.replace(s, kept_ids=None) for s in samples], None, True)
        whole = packed_logprobs(model, batch, kept_ids=False)
        assert torch.equal(whole, packed_logprobs(model, without))
        assert (packed_logprobs(model, batch) > whole).all()
        with pytest.raises(mp.ArgumentError, match=r"kept_ids is of type str.*Fix: pass True or"):
            packed_logprobs(model, batch, kept_ids="no")


def test_a_cached_prefix(model, samples):
    if not takes_encoded_media(model):
        pytest.skip("this transformers takes no encoded media")
    one = samples[0]
    size = kv_bytes_per_token(model)
    index = PrefixIndex(400 * size, bytes_per_token=size, block_size=4)
    kv = RowStore(index.num_rows)
    with torch.no_grad(), attach(model):
        wanted = of_all_logits(model, mp.pack([one]))[0]
        whole = packed_logprobs(model, mp.pack([one]), WARM, kept_ids=False)
    for cached in (False, True):
        found = prefix_logprobs(model, one, index, kv, temperature=WARM)
        assert (found.cached_tokens > 0) == cached
        assert (found.logprobs - wanted).abs().max() <= CLOSE
    found = prefix_logprobs(model, one, index, kv, temperature=WARM, kept_ids=False)
    assert (found.logprobs - whole).abs().max() <= CLOSE


@pytest.fixture(scope="module")
def sampled():
    """A model, what transformers' own filters left of its distribution, and the trainer's side of it."""
    model, hf = tiny_qwen2_5_vl(), qwen_vl_processor()
    processor = mp.wrap_processor(hf)
    picture = {"type": "image", "image": Image.new("RGB", (90, 60), (9, 99, 199))}
    ask = [
        [{"role": "user", "content": [picture, {"type": "text", "text": "Which colour?"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}],
    ]
    torch.manual_seed(0)
    rolled = rollout(model, hf, ask, ["a", "b"], n=3, max_new_tokens=12, **SAMPLER)
    names = ("sample_id", "group_id", "kept_ids", "rollout_logprobs", "sampling", "finish_reason")
    train = [
        processor(
            ask["ab".index(s.group_id)],
            s.input_ids[s.loss_indices],
            **{name: getattr(s, name) for name in names},
        )
        for s in rolled
    ]
    return model, rolled, train


def test_the_sampler_s_lists_are_recorded(sampled):
    _, rolled, train = sampled
    for sample in rolled:
        assert mp.validate(sample) == []
        assert len(sample.kept_ids) == sample.num_loss_tokens
        assert sample.kept_ids.lengths.max() <= SAMPLER["top_k"]
        assert sample.sampling == SAMPLER | {"logprobs": "processed"}
    assert mp.compare(rolled, train).ok
    bare = [dataclasses.replace(s, kept_ids=None) for s in train]
    assert mp.compare(rolled, bare).causes == {"truncated_support": len(bare)}


@pytest.mark.parametrize("layout", ["shared", "left"])
def test_losses_see_an_unchanged_policy_over_its_kept_ids_and_not_over_all(sampled, layout):
    """Not clipped, weights of TIS and MIS are 1, the KL to itself as the reference is 0; over all ids none of that."""
    model, _, train = sampled
    batch = LAYOUTS[layout](train)
    advantages = torch.linspace(-1, 1, len(train))
    rolled = batch.loss_columns["rollout_logprobs"]
    with attach(model), torch.no_grad():
        passes = [
            packed_logprobs(model, batch, SAMPLER["temperature"], entropy=True, kept_ids=k)
            for k in (True, False)
        ]
    assert (passes[0][0] - rolled).abs().max() <= CLOSE
    assert (passes[1][0] - rolled).abs().max() > 0.1
    for kind, correction in itertools.product(VARIANTS, ("tis", "mis")):
        found = []
        for lp, h in passes:
            loss = functools.partial(mp.policy_loss, lp, advantages, batch.cu_loss, kind=kind)
            of_kl = {"ref_logprobs": passes[0][0], "kl_coef": 0.1}
            ratios = loss(old_logprobs=rolled, entropy=h, entropy_coef=0.01, **of_kl)
            weights = loss(rollout_logprobs=rolled, correction=correction)
            found.append(ratios.metrics | {"correction": weights.metrics["correction"]})
        over, whole = ({name: float(v) for name, v in one.items()} for one in found)
        for name, wanted in {"ratio": 1.0, "correction": 1.0, "clip_fraction": 0.0}.items():
            assert over[name] == pytest.approx(wanted, abs=1e-5), (kind, name)
        for name in ("kl_old", "kl_ref"):
            assert over[name] == pytest.approx(0.0, abs=1e-8)
            assert whole[name] > 1e-3
        assert whole["correction"] < 0.95 and whole["ratio"] < 0.95
        assert over["entropy"] < whole["entropy"]
