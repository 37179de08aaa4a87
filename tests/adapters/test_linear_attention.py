"""Gated delta nets over segments: no state leaks, wrong use raises, and checkpoints, copies and LoRA run as they do."""

import copy
import dataclasses
import pickle
import sys

import numpy as np
import pytest
import torch
from support.float64 import assert_as_exact_as_separate, exact, separate, torch_functions
from support.models import logprobs_and_gradients, small_model
from support.samples import make_sample

import mmpack as mp
from mmpack import invariant
from mmpack.adapters.transformers import attach, is_attached, model_inputs, packed_logprobs
from mmpack.adapters.transformers.attention import attach_in_forwards
from mmpack.adapters.transformers.linear_attention import net_of
from mmpack.adapters.transformers.prefix import kv_bytes_per_token
from mmpack.adapters.transformers.routes import router_loss
from mmpack.contracts import TOLERANCES
from mmpack.ops.linear_attention import plan_segments
from mmpack.packing.batch import _tensors_of

pytestmark = pytest.mark.adapter
NAME = "qwen3_5"


@pytest.fixture(scope="module")
def model():
    return small_model(NAME)


@pytest.fixture(autouse=True)
def without_fla(model):
    """What transformers alone gives is its torch functions', where FLA is installed too."""
    with torch_functions(model):
        yield


def texts(last=1):
    """Three samples of text; `last`: the id that the first one ends with."""
    rng = np.random.default_rng(5)
    parts = [[rng.integers(0, 999, 6), rng.integers(0, 999, 4 + k)] for k in range(3)]
    parts[0][1][-1] = last
    return [
        make_sample([("text", a), ("response", b)], f"s{k}", family=NAME)
        for k, (a, b) in enumerate(parts)
    ]


def tree():
    """A prompt of two rows, an answer of one that three samples go on from, and another answer."""
    prompt, answer = ("text", [7, 3]), ("response", [5])
    parts = [[prompt, answer, ("text", [k]), ("response", [k, 9, k])] for k in range(3)]
    parts.append([prompt, ("response", [4, 4])])
    return [make_sample(p, f"s{k}", family=NAME) for k, p in enumerate(parts)]


# ---- leaks --------------------------------------------------------------------------------------------


def test_the_models_own_packed_forward_leaks_and_ours_does_not(model):
    """transformers tells packed samples apart by their positions, in full attention alone."""
    batches = [mp.pack(texts()), mp.pack(texts(last=998))]
    behind = len(texts()[0])
    with torch.no_grad():
        own = [
            model(b.input_ids[None], position_ids=b.position_ids[:, None], use_cache=False)
            for b in batches
        ]
        with attach(model):
            ours = [model(**model_inputs(b, model)) for b in batches]
    first, second = (out.logits[0, behind:] for out in own)
    assert (first - second).abs().max() > 1e-2
    assert torch.equal(*(out.logits[0, behind:] for out in ours))


@pytest.mark.parametrize(
    ("offsets", "parents"),
    [
        ([0, 18], [-1]),  # all rows in one state
        ([0, 2, 3, 7, 11, 15, 17], [-1, 0, 1, 2, 1, 0]),  # a branch reads its sibling
        ([0, 2, 3, 7, 11, 15, 17], [-1, 0, 1, 1, -1, 0]),  # or starts from nothing
    ],
)
def test_the_tests_can_see_a_wrong_plan(model, offsets, parents):
    batch = mp.pack(tree(), share_prefix=True)
    assert batch.segment_offsets.tolist() == [0, 2, 3, 7, 11, 15, 17]
    assert batch.segment_parent.tolist() == [-1, 0, 1, 1, 1, 0]
    offsets[-1] = 17
    wrong = plan_segments(np.array(offsets), np.array(parents))
    wrong.checksum = batch.segment_plan.checksum
    with attach(model), torch.no_grad():
        right = packed_logprobs(model, batch)
        batch.segment_plan = wrong
        assert (packed_logprobs(model, batch) - right).abs().max() > 1e-3


def test_a_moved_batch_moves_all_of_its_plan():
    """And a stream is told of each of its tensors, those of its waves too."""
    batch = mp.pack(tree(), share_prefix=True)
    plan = batch.segment_plan
    known = {x.data_ptr() for x in _tensors_of(plan)}
    for wave in plan.waves[1:]:
        own = {wave.cu_seqlens, wave.chunk_indices, wave.parents, *wave.children}
        assert {x.data_ptr() for x in own} <= known
    assert {x.data_ptr() for x in (plan.previous, *plan.far)} <= known
    moved = batch.to("meta").segment_plan
    assert {x.device.type for x in _tensors_of(moved)} == {"meta"}
    assert moved.checksum == plan.checksum == batch.attention_plan.checksum


# ---- wrong use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_plan": None}, "segment_plan is missing, and linear attention would run across"),
        ({"segment_plan": mp.pack(tree()).segment_plan}, "is of 25 rows, there are 1 × 33"),
        (
            {"segment_plan": mp.pack(texts()[::-1]).segment_plan},
            "segment_plan is of another batch than visible_until",
        ),
        (
            {"segment_plan": mp.pack(texts()[::-1]).segment_plan, "attention_plan": None},
            "segment_plan is of another batch than visible_until",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(model, change, message):
    with attach(model), torch.no_grad():
        inputs = model_inputs(mp.pack(texts()), model)
        with pytest.raises(mp.ModelError, match=message) as caught:
            model(**(inputs | change))
    assert "Fix: call model(**model_inputs(batch, model)), or detach" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_without_its_plan_is_an_error(model):
    batch = dataclasses.replace(mp.pack(texts()), segment_plan=None)
    with attach(model), pytest.raises(mp.ModelError, match="the batch has no segment_plan"):
        model_inputs(batch, model)


def test_nets_that_are_not_known_are_refused():
    with torch.device("meta"):
        model = small_model(NAME)
    net = net_of(model.get_decoder().layers[1])
    norm = net.norm
    del net.norm
    with pytest.raises(mp.ModelError, match=r"layer 1 has linear attention that is not a gated"):
        attach(model)
    net.norm = norm
    net.conv1d = torch.nn.Sequential(net.conv1d)
    with pytest.raises(mp.ModelError, match=r"conv1d of layer 1 is a Sequential.*target_modules"):
        attach(model)
    assert not is_attached(model)


# ---- wrapped, copied, detached -----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_run_again_after_detach_as_they_ran(model, reentrant):
    """And after another batch went through the model."""
    batch = mp.pack(tree(), share_prefix=True)
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch)
    other = copy.deepcopy(model).train()
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        other.enable_input_require_grads()
    weights = torch.linspace(0.1, 1, len(values))
    with attach(model):
        (packed_logprobs(model, batch) * weights).sum().backward()
    with attach(other):
        found = packed_logprobs(other, batch)
        with torch.no_grad():
            packed_logprobs(other, mp.pack(texts()))
    assert not is_attached(other)
    (found * weights).sum().backward()
    assert torch.equal(found, values)
    own = dict(model.named_parameters())
    for name, p in other.named_parameters():
        assert (p.grad is None) == (own[name].grad is None), name
        assert p.grad is None or torch.equal(p.grad, own[name].grad), name
    model.zero_grad(set_to_none=True)
    assert gradients


def test_detached_copied_and_pickled_models_are_their_own():
    model, ids = small_model(NAME), torch.tensor([[1, 2, 3, 4]])
    mask = torch.tensor([[0, 1, 1, 1]])
    batch = mp.pack(tree(), share_prefix=True)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=True).logits
        with attach(model):
            values = packed_logprobs(model, batch)
            copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            assert torch.equal(packed_logprobs(pickled, batch), values)
            pickled_handle = attach(pickled)
        pickled_handle.detach()
        for own in (model, copied, pickled):
            assert not is_attached(own)
            found = own(input_ids=ids, attention_mask=mask, use_cache=True).logits
            assert torch.equal(found, expected)
            with attach(own):
                assert torch.equal(packed_logprobs(own, batch), values)
    nets = [net_of(layer) for layer in copied.get_decoder().layers[:3]]
    assert all(net.forward.net is net for net in nets)


def test_attached_in_forwards_alone():
    model, batch = small_model(NAME), mp.pack(tree(), share_prefix=True)
    with torch.no_grad():
        with attach(model):
            values = packed_logprobs(model, batch)
            inputs = model_inputs(batch, model)
        inputs["input_ids"] = batch.input_ids[None]
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        ids = torch.tensor([[1, 2, 3, 4]])
        tokens = model.generate(input_ids=ids, **options)
        attach_in_forwards(model)
        logits = model(**inputs).logits[0]
        found = mp.selected_logprobs(logits, batch.loss_targets, rows=batch.loss_rows)
        assert (found - values).abs().max() <= 1e-5
        assert torch.equal(model.generate(input_ids=ids, **options), tokens)


def test_lora_of_linear_layers():
    peft = pytest.importorskip("peft")
    samples = tree()
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        small_model(NAME), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    ).eval()
    wanted, exactly = exact(wrapped, samples)
    _, separately = separate(wrapped, samples)
    with attach(wrapped):
        found, ours = logprobs_and_gradients(wrapped, mp.pack(samples, share_prefix=True))
    assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value
    assert len(ours) == 2 * 3 * len(targets) and all((g != 0).any() for g in ours.values())
    assert_as_exact_as_separate(ours, separately, exactly)


def test_half_precision_is_about_as_near_as_separate_forwards(model):
    samples, low = tree(), copy.deepcopy(model).bfloat16()
    wide = copy.deepcopy(low).float()
    with torch.no_grad():
        wanted, apart = (
            torch.cat([packed_logprobs(m, mp.pad([s])) for s in samples]) for m in (wide, low)
        )
        with attach(low):
            found = packed_logprobs(low, mp.pack(samples, share_prefix=True))
    assert (found - wanted).square().mean() <= 2**2 * (apart - wanted).square().mean()


def test_autocast_is_about_as_near_as_separate_forwards(model):
    samples = tree()
    with torch.no_grad():
        wanted = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            apart = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
            with attach(model):
                found = packed_logprobs(model, mp.pack(samples, share_prefix=True))
    assert (found - wanted).square().mean() <= 2**2 * (apart - wanted).square().mean()


def test_the_routers_loss_counts_each_row_once():
    """As of the unshared forward in which a prefix counts at its first sample only."""
    model = small_model("qwen3_5_moe")
    samples = [dataclasses.replace(s, family="qwen3_5_moe") for s in tree()[:3]]
    plain, shared = mp.pack(samples), mp.pack(samples, share_prefix=True, pad_to_multiple_of=16)
    with attach(model), torch.no_grad():
        logits, found = (
            model(**model_inputs(b, model), output_router_logits=True).router_logits
            for b in (plain, shared)
        )
    first = torch.ones(len(plain.input_ids), dtype=torch.int64)
    for b in (1, 2):
        first[7 * b : 7 * b + 3] = 0
    text = model.config.get_text_config()
    theirs = sys.modules[type(model).__module__].load_balancing_loss_func
    wanted = theirs(logits, text.num_experts, text.num_experts_per_tok, first[None])
    assert abs(router_loss(model, shared, found) - wanted) <= 1e-5


# ---- what is refused ---------------------------------------------------------------------------------


def test_what_keeps_kv_alone_or_needs_one_order_of_sums(model):
    sample = texts()[0]
    with pytest.raises(
        mp.ModelError, match="KV of each token before it, and the model has linear attention"
    ):
        kv_bytes_per_token(model)
    with (
        attach(model),
        invariant.batch_invariant(model),
        pytest.raises(mp.ModelError, match="batch_invariant: the model has linear attention"),
    ):
        packed_logprobs(model, mp.pack([sample]))
