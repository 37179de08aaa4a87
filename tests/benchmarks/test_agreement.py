"""The check of `python -m benchmarks.step`: what it refuses, and the kind of weight that it names."""

import dataclasses

import pytest
import torch

from benchmarks.step import agreement
from benchmarks.step.agreement import Result, distance
from benchmarks.step.peers import PEERS
from benchmarks.step.step import Options, case_of
from mmpack.adapters.transformers.modules import tower_blocks

QKV = "model.visual.blocks.0.attn.qkv.weight"
DQ = "visual.blocks.*.attn.qkv.weight[q]"
OTHER = "model.language_model.layers.0.mlp.up_proj.weight"
ERROR = 1e-5  # of the padded peer


def result(seed=None, small=1.0):
    """The oracle's, or one that is `ERROR` off. `small`: the size of the tower's gradients."""
    torch.manual_seed(0)
    gradients = {QKV: small * torch.randn(30, 10), OTHER: torch.randn(40, 10)}
    logprobs = torch.randn(7)
    if seed is not None:
        torch.manual_seed(seed)
        gradients = {n: g * (1 + ERROR * torch.randn_like(g)) for n, g in gradients.items()}
    norm = sum(float(g.norm()) ** 2 for g in gradients.values()) ** 0.5
    return Result(logprobs, gradients, norm)


def beyond(found, small=1.0):
    want = result(small=small)
    allowed = distance(result(1, small), want)
    return distance(found, want).beyond(allowed, torch.float32)


def changed(found, **gradients):
    return dataclasses.replace(found, gradients=found.gradients | gradients)


def scaled(gradient, factor):
    return torch.cat([gradient[:10] * factor, gradient[10:]])


@pytest.mark.parametrize("factor", [1.3, 0.0])
def test_a_wrong_kind_is_named(factor):
    found = result(2)
    found = changed(found, **{QKV: scaled(found.gradients[QKV], factor)})
    assert beyond(found) == ["gradients", DQ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["gradient", "norm", "logprobs"])
def test_no_number_is_refused(where, value):
    """The norm alone has it where the weight is not watched."""
    found = result(2)
    if where == "gradient":
        wrong = found.gradients[QKV].clone()
        wrong[29, 3] = value
        assert beyond(changed(found, **{QKV: wrong})) == ["gradients", DQ.replace("[q]", "[v]")]
    elif where == "norm":
        assert beyond(dataclasses.replace(found, norm=value)) == ["norm"]
    else:
        logprobs = found.logprobs.clone()
        logprobs[2] = value
        assert beyond(dataclasses.replace(found, logprobs=logprobs)) == ["logprobs"]


def test_a_gradient_that_is_missing_or_too_much():
    found = result(2)
    less = dataclasses.replace(found, gradients={QKV: found.gradients[QKV]})
    assert beyond(less) == ["gradients", "layers.*.mlp.up_proj.weight"]
    assert beyond(changed(found, **{"model.more.weight": torch.zeros(2)})) == []
    more = changed(found, **{"model.more.weight": torch.full((2,), 1e-9)})
    assert beyond(more) == ["more.weight"]


# -- with a model ------------------------------------------------------------------------------------------------------

NAME = "qwen2.5-vl-3b"
OPTIONS = Options([NAME], ["geo"], [], tiny=True)
CPU = torch.device("cpu")


def names_beyond(case, factor):
    """Of the peer `plain`, whose gradient to the queries of the tower's first block is scaled."""
    want, allowed = case.hold_to()
    model = case.build()

    def wrong(gradient):
        q, k, v = gradient.chunk(3, -1)
        return torch.cat([q * factor, k, v], -1)

    def hook(module, args, output):
        out = output.clone()
        out.register_hook(wrong)
        return out

    tower_blocks(model)[0].attn.qkv.register_forward_hook(hook)
    with PEERS["plain"].prepared(model):
        found = agreement.result(model, case.job, PEERS["plain"])
    return distance(found, want).beyond(allowed, torch.float32)


def assert_seen(case):
    assert names_beyond(case, 1.0) == []
    names = names_beyond(case, 1.3)
    assert {DQ, "visual.blocks.*.attn.qkv.bias[q]"} <= set(names), names
    # what lies before the queries in the forward is wrong with them, and nothing else
    rest = {n for n in names if "[q]" not in n} - {"gradients", "norm"}
    assert rest <= {"visual.blocks.*.norm1.weight", "visual.patch_embed.proj.weight"}, names


@pytest.mark.slow
def test_a_wrong_dq_of_a_tower():
    assert_seen(case_of(OPTIONS, NAME, "geo", CPU))
