"""Numbers and types that would give a wrong loss in silence: each is one line with what is due and the fix."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.aggregate import aggregate
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import kl_divergence
from mmpack.ops.attention.tree_attention import tree_attention
from mmpack.planning.cost import CostModel

NAN, INF = math.nan, math.inf
N, CU = 3, torch.tensor([0, 1, 3]).int()


def gae(**keywords):
    arguments = {"rewards": torch.ones(N), "values": torch.zeros(N), "cu_loss": CU}
    return mp.gae(**(arguments | keywords))


def value_loss(**keywords):
    arguments = {"values": torch.ones(N), "returns": torch.zeros(N), "cu_loss": CU}
    return mp.value_loss(**(arguments | keywords))


def advantages(**keywords):
    arguments = {"rewards": torch.ones(N), "group_index": torch.tensor([0, 0, 1])}
    return mp.group_advantages(**(arguments | keywords))


def policy(**keywords):
    arguments = {"logprobs": torch.ones(N), "advantages": torch.ones(2), "cu_loss": CU}
    return mp.policy_loss(**(arguments | keywords))


def kl(**keywords):
    return kl_divergence(**({"logprobs": torch.ones(N), "ref_logprobs": torch.ones(N)} | keywords))


def correction(**keywords):
    x = torch.ones(N)
    return correction_weights(
        **({"old_logprobs": x, "rollout_logprobs": x, "cu_loss": CU} | keywords)
    )


def summed(**keywords):
    return aggregate(**({"terms": torch.ones(N), "cu_loss": CU} | keywords))


def selected(**keywords):
    arguments = {"logits": torch.zeros(N, 7), "targets": torch.arange(N)}
    return mp.selected_logprobs(**(arguments | keywords))


def linear(**keywords):
    arguments = {
        "hidden": torch.zeros(N, 4),
        "weight": torch.zeros(7, 4),
        "targets": torch.arange(N),
    }
    return mp.linear_selected_logprobs(**(arguments | keywords))


def attention(**keywords):
    x = torch.zeros(1, 2, N, 4)
    arguments = {
        "query": x,
        "key": x,
        "value": x,
        "visible_until": torch.full((N,), N, dtype=torch.int32),
    }
    return tree_attention(**(arguments | keywords))


def batch():
    return mp.pack([make_sample([("text", [1, 2]), ("response", [3])])])


def unpack_tokens(x):
    return batch().unpack_tokens(x)


def unpack_loss(x):
    return batch().unpack_loss(x)


def merge(**keywords):
    arguments = {
        "embeddings": torch.zeros(N, 4),
        "features": torch.zeros(0, 4),
        "vision": batch().vision_rows,
    }
    return mp.merge_embeddings(**(arguments | keywords))


CASES = [
    (unpack_tokens, {"x": [1.0] * N}, "unpack_tokens: x is of type list, expected a tensor"),
    (unpack_tokens, {"x": np.zeros(N)}, "unpack_tokens: x is a numpy array"),
    (unpack_loss, {"x": None}, "unpack_loss: x is None"),
    (merge, {"embeddings": np.zeros((N, 4))}, "embeddings is a numpy array"),
    (merge, {"features": None}, "features is None"),
    (merge, {"levels": [[0.0]]}, "levels[0] is of type list"),
    (merge, {"vision": torch.zeros(N)}, "vision is of type Tensor, expected VisionRows"),
    (gae, {"gamma": NAN}, "gamma is nan, expected a finite number of 0 or more up to 1"),
    (gae, {"gamma": 1.5}, "gamma is 1.5"),
    (gae, {"lam": -0.1}, "lam is -0.1"),
    (gae, {"lam": None}, "lam is None"),
    (gae, {"rewards": [1.0] * N}, "rewards is of type list, expected a tensor"),
    (gae, {"values": None}, "values is None, expected a tensor"),
    (gae, {"bootstrap": [0.0, 0.0]}, "bootstrap is of type list, expected a tensor"),
    (value_loss, {"scale": NAN}, "scale is nan"),
    (value_loss, {"scale": -1}, "scale is -1"),
    (value_loss, {"clip": -0.2, "old_values": torch.zeros(N)}, "clip is -0.2"),
    (value_loss, {"clip": NAN, "old_values": torch.zeros(N)}, "clip is nan"),
    (value_loss, {"total_tokens": 2}, "total_tokens is 2, expected a finite number of 3 or more"),
    (value_loss, {"returns": np.zeros(N)}, "returns is a numpy array"),
    (advantages, {"eps": NAN}, "eps is nan"),
    (advantages, {"eps": -1e-6}, "eps is -1e-06"),
    (advantages, {"rewards": [1.0] * N}, "rewards is of type list"),
    (advantages, {"group_index": ["a", "a", "b"]}, "group_index is of type list"),
    (advantages, {"num_tokens": torch.ones(N).long()}, "num_tokens is given, but kind is 'grpo'"),
    (advantages, {"kind": "reinforce_pp", "num_tokens": torch.ones(N)}, "dtype torch.float32"),
    (advantages, {"kind": "reinforce_pp", "num_tokens": torch.ones(2).long()}, "shape [2]"),
    (
        advantages,
        {"kind": "reinforce_pp", "num_tokens": torch.tensor([1, -1, 2])},
        "num_tokens holds -1",
    ),
    (advantages, {"kind": torch.zeros(2, 2)}, "kind is of type Tensor. Fix: use one of grpo"),
    (
        advantages,
        {"rewards": torch.tensor([1e39, 0, 0], dtype=torch.float64)},
        "rewards[0] is 1e+39",
    ),
    (
        advantages,
        {"rewards": torch.tensor([1e200, 0, 0], dtype=torch.float64)},
        "rewards[0] is 1e+200",
    ),
    (advantages, {"group_index": torch.tensor([True, True, False])}, "torch.bool"),
    (advantages, {"rewards": torch.ones(N).to_sparse()}, "layout torch.sparse_coo"),
    (
        advantages,
        {"kind": "reinforce_pp", "num_tokens": torch.tensor([True, True, False])},
        "torch.bool",
    ),
    (policy, {"kind": np.zeros(2)}, "kind is a numpy array"),
    (policy, {"kl_kind": torch.zeros(2, 2)}, "kind is of type Tensor"),
    (policy, {"correction": torch.zeros(2)}, "kind is of type Tensor"),
    (policy, {"advantages": torch.ones(2) * 1j}, "advantages are torch.complex64"),
    (policy, {"logprobs": torch.ones(N).to(torch.float8_e4m3fn)}, "dtype torch.float8_e4m3fn"),
    (policy, {"logprobs": torch.ones(N).to_sparse()}, "layout torch.sparse_coo"),
    (policy, {"clip_high": 10**400}, "clip_high is too large for a float"),
    (policy, {"scale": 10**400}, "scale is too large for a float"),
    (policy, {"total_tokens": 10**400}, "total_tokens is too large for a float"),
    (value_loss, {"scale": Fraction(1, 2)}, "scale is of type Fraction"),
    (gae, {"bootstrap": torch.zeros(2) * 1j}, "torch.complex64"),
    (kl, {"logprobs": [1.0]}, "logprobs is of type list"),
    (kl, {"ref_logprobs": None}, "ref_logprobs is None"),
    (kl, {"ref_logprobs": torch.ones(N, device="meta")}, "on meta"),
    (correction, {"old_logprobs": np.ones(N)}, "old_logprobs is a numpy array"),
    (correction, {"cu_loss": torch.tensor([0, 2])}, "cu_loss runs from 0 to 2 for 3"),
    (correction, {"level": "turn"}, "level is 'turn'. Fix: use one of token"),
    (summed, {"terms": [1.0]}, "terms is of type list"),
    (summed, {"cu_loss": torch.tensor([0, 2])}, "cu_loss runs from 0 to 2 for 3"),
    (summed, {"aggregation": torch.zeros(2, 2)}, "aggregation is of type Tensor"),
    (summed, {"max_tokens": torch.zeros(2, 2)}, "max_tokens is of type Tensor"),
    (selected, {"gradient": torch.zeros(2, 2)}, "gradient is of type Tensor"),
    (
        selected,
        {"rows_unique": torch.tensor(1), "row_inverse": torch.tensor([0, 0, 0])},
        "rows_unique has shape []",
    ),
    (selected, {"temperature": 10**400}, "temperature is too large for a float"),
    (selected, {"temperature": INF}, "temperature is inf, expected a finite number above 0"),
    (selected, {"temperature": NAN}, "temperature is nan"),
    (selected, {"temperature": torch.tensor(1.0)}, "temperature is of type Tensor"),
    (selected, {"logits": np.zeros((N, 7))}, "logits is a numpy array"),
    (selected, {"targets": [0, 1, 2]}, "targets is of type list"),
    (selected, {"rows": (0, 1, 2)}, "rows is of type tuple"),
    (linear, {"temperature": INF}, "temperature is inf"),
    (linear, {"softcap": INF}, "softcap is inf, expected a finite number above 0"),
    (linear, {"softcap": NAN}, "softcap is nan"),
    (linear, {"memory_budget": NAN}, "memory_budget is nan"),
    (linear, {"weight": None}, "weight is None"),
    (linear, {"bias": [0.0] * 7}, "bias is of type list"),
    (attention, {"scale": NAN}, "scale is nan"),
    (attention, {"dropout": -0.1}, "dropout is -0.1"),
    (attention, {"dropout": 1.5}, "dropout is 1.5"),
    (attention, {"visible_until": [N] * N}, "visible_until is of type list"),
    (attention, {"visible_until": torch.full((N + 1,), N)}, "visible_until has shape [4]"),
    (attention, {"visible_until": torch.full((N,), 3.0)}, "dtype torch.float32"),
    (attention, {"key": torch.zeros(1, 2, N + 1, 4)}, "key has shape [1, 2, 4, 4]"),
    (attention, {"query": torch.zeros(2, N, 4)}, "query has shape [2, 3, 4]"),
    (CostModel, {"pair": NAN}, "pair is nan"),
    (CostModel, {"row": -1.0}, "row is -1.0"),
    (mp.plan, {"samples": [], "max_tokens": NAN}, "max_tokens is nan"),
    (mp.plan, {"samples": [], "max_tokens": None}, "max_tokens is None"),
    (mp.plan, {"samples": [], "max_tokens": 8, "ranks": 0.5}, "ranks is 0.5"),
    (mp.plan, {"samples": [], "max_tokens": 8, "max_patches": -1}, "max_patches is -1"),
]


@pytest.mark.parametrize(("call", "keywords", "says"), CASES)
def test_each_is_one_line_with_a_fix(call, keywords, says):
    with pytest.raises(ArgumentError) as error:
        call(**keywords)
    message = str(error.value)
    assert says in message and "Fix: " in message and "\n" not in message


@pytest.mark.parametrize("cost", [NAN, INF, -1.0, None])
def test_a_cost_that_is_none(cost):
    with pytest.raises(ArgumentError, match=r"plan: cost\(\d+, \d+, \d+\) is .* Fix: return what"):
        mp.plan(
            [make_sample([("text", [1, 2]), ("response", [3])])],
            max_tokens=10_000,
            cost=lambda rows, pairs, patches: cost,
        )


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(1), 1, 0.5])
def test_numbers_of_numpy_are_numbers(value):
    assert selected(temperature=value).shape == linear(temperature=value).shape == (N,)
    assert gae(gamma=value)[0].shape == (N,)
    assert value_loss(scale=value).shape == ()
    assert advantages(eps=value).shape == (N,)
    assert linear(memory_budget=1e6).shape == (N,)
    lp = torch.zeros(N)
    options = {"scale": value, "clip_high": value, "kl_coef": value, "dual_clip": value * 4}
    out = mp.policy_loss(lp, lp, CU, ref_logprobs=lp, total_tokens=np.int64(4), **options)
    assert out.loss.shape == ()


def test_checks_are_traced():
    """Under torch.compile numbers may be symbols: the checks make no graph break."""

    def step(x, scale):
        return mp.value_loss(x, x * 0, CU, scale=scale) + mp.policy_loss(x, x, CU, scale=scale).loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for scale in (1.0, 2.0, 3.5):
        x = torch.randn(N)
        torch.testing.assert_close(compiled(x, scale), step(x, scale))


@pytest.mark.parametrize(
    "wrong", [{"correction_level": None}, {"correction_low": None}, {"correction_high": "2"}]
)
def test_options_of_a_correction_that_is_off_are_looked_at_too(wrong):
    with pytest.raises(ArgumentError, match=r"^correction_weights: (level|low|high) is .* Fix: "):
        policy(**wrong)


def test_logprobs_of_the_rollout_that_no_correction_reads():
    with pytest.warns(
        mp.LossWarning, match="correction is None.* Fix: pass correction='tis'"
    ) as caught:
        policy(rollout_logprobs=torch.zeros(N))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy(rollout_logprobs=torch.zeros(N), correction="tis")
        policy()


def test_integer_logprobs_are_to_be_floats():
    with pytest.raises(ArgumentError, match=r"torch.int64.* Fix: pass logprobs.float\(\)"):
        mp.policy_loss(torch.tensor([1, 2]), torch.ones(1), torch.tensor([0, 2], dtype=torch.int32))
