"""The flags: `enable` on modules that look like vime's and slime's, and vime's provider on requests of its form."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack.adapters.vime import enable
from mmpack.adapters.vime.linear_logp import provider
from mmpack.adapters.vime.objective import loss as mmpack_loss
from mmpack.adapters.vime.responses import log_probs_and_entropy
from mmpack.contracts import gradient_fp32_bound, linear_logprob_bound, selected_logprob_bound
from mmpack.errors import ArgumentError, ModelError


def framework(monkeypatch, name):
    """Modules that hold their functions as `from .loss import …` leaves them."""
    theirs = {
        "get_log_probs_and_entropy": lambda: f"logprobs of {name}",
        "policy_loss_function": lambda: f"loss of {name}",
    }
    modules = []
    for part, names in (("loss", theirs), ("actor", ["get_log_probs_and_entropy"]), ("data", [])):
        module = types.ModuleType(f"{name}.backends.megatron_utils.{part}")
        for own in names:
            setattr(module, own, theirs[own])
        monkeypatch.setitem(sys.modules, module.__name__, module)
        modules.append(module)
    return modules


@pytest.mark.parametrize("name", ["vime", "slime"])
def test_one_flag_puts_both_functions_in_place(name, monkeypatch):
    loss, actor, _ = framework(monkeypatch, name)
    other = types.ModuleType("elsewhere")
    other.get_log_probs_and_entropy = loss.get_log_probs_and_entropy
    monkeypatch.setitem(sys.modules, "elsewhere", other)
    theirs = loss.get_log_probs_and_entropy
    module, _, function = "mmpack.adapters.vime.enable".rpartition(".")
    with getattr(sys.modules[module], function)(SimpleNamespace(qkv_format="thd")):
        assert loss.policy_loss_function is mmpack_loss
        assert loss.get_log_probs_and_entropy is log_probs_and_entropy
        assert actor.get_log_probs_and_entropy is log_probs_and_entropy
        assert other.get_log_probs_and_entropy is theirs
        with pytest.raises(ModelError, match="is enabled already"):
            enable(SimpleNamespace())
    assert actor.get_log_probs_and_entropy is theirs is loss.get_log_probs_and_entropy
    assert loss.policy_loss_function() == f"loss of {name}"


def test_what_would_bypass_it_is_refused(monkeypatch):
    with pytest.raises(ModelError, match="neither vime's nor slime's"):
        enable(SimpleNamespace())
    framework(monkeypatch, "vime")
    with pytest.raises(ModelError, match="linear_logp_provider is 'rl_engine"):
        enable(SimpleNamespace(linear_logp_provider="rl_engine.provider"))
    with pytest.raises(ModelError, match="qkv_format is 'bshd'"):
        enable(SimpleNamespace(qkv_format="bshd"))
    with enable(SimpleNamespace(linear_logp_provider="mmpack.adapters.vime.linear_logp.provider")):
        pass


def request(logits, targets, **more):
    """A LinearLogpRequest, as vime's docs describe it."""
    given = {
        "logits": logits,
        "target_ids": targets,
        "tensor_parallel_group": None,
        "token_layout": SimpleNamespace(world_size=1, rank=0, layout="single"),
        "with_entropy": True,
        "with_entropy_grad": True,
        "chunk_size": -1,
        "log_prob_keep_mask": None,
        "context": None,
        "temperature": 0.7,
        "metadata": {"logits_are_temperature_scaled": True},
    }
    return SimpleNamespace(**given | more)


def problem(rows=40, vocab=64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 16), 0.5 * torch.randn(vocab, 16)
    bias = torch.randn(vocab)
    targets = torch.randint(0, vocab, (rows,))
    return hidden, weight, bias, targets, torch.randn(2, rows)


def oracle(hidden, weight, bias, targets, up, mask=None):
    """Logprobs, entropies and gradients in float64, at temperature 0.7."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    z = (leaves[0] @ leaves[1].T + leaves[2]) / 0.7
    z.retain_grad()
    full = z.log_softmax(-1)
    kept = full
    if mask is not None:
        target = torch.nn.functional.one_hot(targets, len(weight)).bool()
        kept = z.masked_fill(~(mask | target), -1e30).log_softmax(-1)
    lp = kept.gather(1, targets[:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    (lp @ up[0].double() + entropy @ up[1].double()).backward()
    return lp.detach(), entropy.detach(), [x.grad for x in (*leaves, z)]


@pytest.mark.parametrize("way", ["logits", "unscaled", "rows", "mask", "hidden"])
def test_a_provider_of_logprobs(way):
    hidden, weight, bias, targets, up = problem()
    mask = torch.rand(40, 64) < 0.4 if way == "mask" else None
    lp, entropy, grads = oracle(hidden, weight, bias, targets, up, mask)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    z = leaves[0] @ leaves[1].T + leaves[2]
    more = {"log_prob_keep_mask": mask}
    if way == "unscaled":
        more |= {"metadata": {"logits_are_temperature_scaled": False}}
    elif way == "rows":
        more |= {"metadata": {"logits_are_temperature_scaled": False}}
        more |= {"temperature": torch.full((40,), 0.7)}
    else:
        z = z / 0.7
    if way == "hidden":
        z = torch.full_like(z, torch.nan).requires_grad_()  # nothing reads it
        head = SimpleNamespace(weight=leaves[1], bias=leaves[2])
        more |= {"context": SimpleNamespace(hidden=leaves[0], projection=head)}
    got = provider(request(z, targets, **more))
    assert got.logp.shape == (40, 1) and got.entropy.shape == (40,)
    assert got.backend_id == f"mmpack.{'linear_' * (way == 'hidden')}selected_logprobs"
    assert got.contract_id and got.provenance["torch"] == torch.__version__
    bound = linear_logprob_bound(50.0) if way == "hidden" else selected_logprob_bound(lp) + 2e-6
    assert ((got.logp[:, 0] - lp).abs() <= bound).all()
    assert ((got.entropy - entropy).abs() <= 1e-5).all()
    (got.logp[:, 0] @ up[0] + got.entropy @ up[1]).backward()
    for leaf, expected in zip(leaves, grads, strict=False):
        assert ((leaf.grad - expected).abs() <= gradient_fp32_bound(expected.abs().max()) * 4).all()


def test_a_provider_gives_what_is_asked_for():
    *_, targets, _ = problem()
    logits = torch.randn(40, 64, requires_grad=True)
    for mask in (None, torch.rand(40, 64) < 0.5):
        given = request(logits, targets, with_entropy_grad=False, log_prob_keep_mask=mask)
        got = provider(given)
        assert got.logp.requires_grad and not got.entropy.requires_grad
    assert provider(request(logits, targets, with_entropy=False)).entropy is None
    for given, why in (
        ({"logits": logits}, "the request is of type dict"),
        (request(logits, targets, metadata={"top_p_sparse_token_ids": targets}), "top_p_sparse"),
    ):
        with pytest.raises(ArgumentError, match=why):
            provider(given)


@pytest.mark.slow
def test_a_provider_over_ranks(tmp_path):
    spawned(_rank, 2, tmp_path)


def _rank(rank, ranks):
    hidden, weight, bias, targets, up = problem()
    part = slice(32 * rank, 32 * (rank + 1))
    for mask in (None, torch.rand(40, 64) < 0.4, torch.rand(40, 64) < 0.02):
        lp, entropy, grads = oracle(hidden, weight, bias, targets, up, mask)
        z = ((hidden @ weight.T + bias) / 0.7)[:, part].clone().requires_grad_()
        head = SimpleNamespace(weight=weight[part], bias=None)
        got = provider(
            request(
                z,
                targets,
                tensor_parallel_group=distributed.group.WORLD,
                log_prob_keep_mask=None if mask is None else mask[:, part],
                context=SimpleNamespace(hidden=hidden, projection=head),
            )
        )
        assert got.backend_id == "mmpack.sharded_selected_logprobs"
        assert ((got.logp[:, 0] - lp).abs() <= selected_logprob_bound(lp) + 2e-6).all()
        assert ((got.entropy - entropy).abs() <= 1e-5).all()
        (got.logp[:, 0] @ up[0] + got.entropy @ up[1]).backward()
        whole = grads[3][:, part]
        assert ((z.grad - whole).abs() <= gradient_fp32_bound(grads[3].abs().max()) * 4).all()
