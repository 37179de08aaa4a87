"""The kernels of losses, advantages, rewards and returns, compiled for each target."""

import math

import pytest
from support.offline_compile import compiled_size, each_target

from mmpack.losses.policy.variants import SURROGATES

pytestmark = pytest.mark.compile

COLUMNS = ("logprobs", "entropy", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
NUMBERS = ("scale", "ratio_low", "ratio_high", "dual_clip", "kl_coef", "entropy_coef")
POLICY = {
    **dict.fromkeys(COLUMNS, "*fp32"),
    **dict.fromkeys(("loss", "metrics", "derivatives"), "*fp32"),
    **dict.fromkeys(("place", "count", "num_samples", "parts"), "i32"),
    **dict.fromkeys((*NUMBERS, "correction_low", "correction_high"), "fp64"),
    "cu_loss": "*i32",
    "total": "*i64",
    "partials": "*fp64",
    "tickets": "*i32",
}
PLAIN = {
    "scale": 1.0,
    "sample_mean": True,
    "surrogate": "gspo",
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "dual_clip": math.inf,
    "kl_kind": "k3",
    "kl_coef": 0.1,
    "entropy_coef": 0.1,
    "correction": "tis",
    "correction_level": "token",
    "correction_low": 0.0,
    "correction_high": 2.0,
}
# Options, whether advantages are [B], and the tensors that are not there.
BARE = {"sample_mean": False, "entropy_coef": 0.0, "correction": None}
GEOMETRIC = {"kl_kind": "k2", "correction": "mis", "correction_level": "geometric"}
CASES = {
    **{
        name: (BARE | {"surrogate": name}, True, {"entropy", "total", "rollout_logprobs"})
        for name in SURROGATES
    },
    "clip tis": ({"surrogate": "clip", "kl_kind": "k1", "kl_coef": 0.0}, False, {"total"}),
    "gspo mis": (GEOMETRIC, True, set()),
    "gspo dual": ({"dual_clip": 3.0}, True, set()),
    "cispo tis": ({"surrogate": "cispo", "entropy_coef": 0.0}, True, {"old_logprobs"}),
}


@each_target
@pytest.mark.parametrize("variant", CASES)
def test_policy_loss(target, variant):
    from mmpack.losses.policy import triton as m
    from mmpack.losses.policy.call import Options

    options, by_sample, absent = CASES[variant]
    signature = {name: kind for name, kind in POLICY.items() if name not in absent}
    constants = m.variant(Options(**PLAIN | options), by_sample)
    constants |= dict.fromkeys(absent) | {"MERGE": 256}
    assert compiled_size(m.policy_loss_kernel, signature, constants, target, num_warps=4) > 0


@each_target
@pytest.mark.parametrize(
    "kind", ["grpo", "rloo", "dr_grpo", "lite_ppo", "reinforce_pp", "reinforce_pp of tokens"]
)
def test_group_advantages(target, kind):
    from mmpack.losses.advantages import triton as m

    last = {"baselined": "*fp64", "tickets": "*i32"}
    kind, _, tokens = kind.partition(" of ")
    signature = {
        "rewards": "*fp32",
        "groups": "*i64",
        "out": "*fp32",
        "place": "i32",
        "count": "i32",
        "eps": "fp64",
    }
    constants = {"KIND": kind, "ROWS": m.ROWS, "COLUMNS": m.COLUMNS}
    if tokens:
        signature["tokens"] = "*i64"
    else:
        constants["tokens"] = None
    if kind == "reinforce_pp":
        signature |= last
    else:
        constants |= dict.fromkeys(last)
    assert compiled_size(m.advantages_kernel, signature, constants, target, num_warps=4) > 0


@each_target
@pytest.mark.parametrize("at", ["last", "all", "mean"])
def test_scatter_rewards(target, at):
    from mmpack.losses.rewards import triton as m

    signature = {"rewards": "*fp32", "cu_loss": "*i32", "out": "*fp32", "parts": "i32"}
    constants = {"AT": at, "BLOCK": m.BLOCK}
    signature["weight"] = "fp64"
    assert compiled_size(m.scatter_kernel, signature, constants, target, num_warps=4) > 0


@each_target
@pytest.mark.parametrize("weighed", [False, True])
def test_scatter_scores(target, weighed):
    from mmpack.losses.rewards import triton as m

    columns = {"values": "*fp64", "offsets": "*i64", "edges": "*i64", "index": "*i64"}
    signature = columns | {"out": "*fp32", **dict.fromkeys(("pieces", "steps", "count"), "i32")}
    constants = {"BLOCK": m.BLOCK}
    if weighed:
        signature["factors"] = "*fp64"
    else:
        constants["factors"] = None
    options = {"num_warps": 4, "enable_fp_fusion": False}
    assert compiled_size(m.table_kernel, signature, constants, target, **options) > 0


@each_target
@pytest.mark.parametrize("absent", [(), ("values",), ("bootstrap",), ("values", "bootstrap")])
@pytest.mark.parametrize(("dtype", "out"), [("*bf16", "*fp32"), ("*fp32", "*fp64")])
def test_segment_returns(target, dtype, out, absent):
    from mmpack.losses.returns import triton as m

    signature = {"rewards": dtype, "values": dtype, "bootstrap": dtype, "cu": "*i32"}
    signature |= {"out": out, "count": "i32", "gamma": "fp64", "decay": "fp64"}
    signature = {name: kind for name, kind in signature.items() if name not in absent}
    constants = {"BLOCK": m.BLOCK} | dict.fromkeys(absent)
    assert compiled_size(m.returns_kernel, signature, constants, target, num_warps=4) > 0
