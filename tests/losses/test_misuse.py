"""Numbers and types that would give a wrong loss in silence: each is one line with what is due and the fix."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.aggregate import aggregate
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import kl_divergence
from mmpack.planning.cost import CostModel

NAN, INF = math.nan, math.inf
N, CU = 3, torch.tensor([0, 1, 3]).int()
ONES, ZEROS, TWO = torch.ones(N), torch.zeros(N), torch.ones(2)
GROUPS, ANCHOR = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 2])
TEACHER = mp.ops.ScoredSupport(torch.tensor([0, 2, 3]), torch.tensor([3, 7, 5]), -ONES)
ONE = [[mp.Score("f", 1.0)]]


def batch():
    return mp.pack([make_sample([("text", [1, 2]), ("response", [3])])])


def norm(max_tokens):
    return {"aggregation": "sequence_mean_token_sum_norm", "max_tokens": max_tokens}


# What is called, and arguments that it takes.
CALLS = {
    mp.policy_loss: {"logprobs": ONES, "advantages": TWO, "cu_loss": CU},
    mp.value_loss: {"values": ONES, "returns": ZEROS, "cu_loss": CU},
    mp.gae: {"rewards": ONES, "values": ZEROS, "cu_loss": CU},
    mp.discounted_returns: {"rewards": ONES, "cu": CU},
    mp.group_advantages: {"rewards": ONES, "group_index": GROUPS},
    mp.losses.turn_advantages: {"rewards": ONES, "cu_turns": CU, "group_index": ANCHOR[:2]},
    mp.losses.score_advantages: {"scores": ONE, "group_index": [0]},
    mp.losses.score_columns: {"scores": ONE},
    mp.group_numbers: {},
    mp.losses.turns_of: {},
    mp.scatter_rewards: {},
    mp.losses.linear_length_scores: {"lengths": [1], "target": 5},
    mp.losses.soft_overlong_scores: {"lengths": [1], "max_length": 5, "buffer": 2},
    mp.losses.cosine_length_scores: {"lengths": [1], "correct": [True], "max_length": 5},
    mp.losses.group_length_scores: {"lengths": [1], "group_index": [0], "correct": [True]},
    mp.losses.teacher_divergence: {"logprobs": -ONES, "teacher": TEACHER},
    mp.distillation_loss: {
        "logprobs": {"7B": -ONES},
        "teachers": {"7B": TEACHER},
        "cu_loss": torch.tensor([0, 2]),
    },
    mp.losses.teacher_logprobs: {"teacher": TEACHER, "targets": torch.tensor([3, 5])},
    mp.losses.teacher_advantages: {
        "logprobs": -TWO,
        "targets": torch.tensor([3, 5]),
        "teachers": {"7B": TEACHER},
    },
    kl_divergence: {"logprobs": ONES, "ref_logprobs": ONES},
    correction_weights: {"old_logprobs": ONES, "rollout_logprobs": ONES, "cu_loss": CU},
    aggregate: {"terms": ONES, "cu_loss": CU},
    mp.linear_selected_logprobs: {
        "hidden": torch.zeros(N, 4),
        "weight": torch.zeros(7, 4),
        "targets": torch.arange(N),
    },
    mp.plan: {"samples": [], "max_tokens": 8},
    CostModel: {},
}
ROLLOUT = {"rollout_logprobs": ZEROS}
OVER_BATCH = {"kind": "reinforce_pp"}
CASES = [
    # tensors: kind, layout, dtype, shape, device, offsets
    (mp.policy_loss, {"logprobs": np.zeros(N)}, "logprobs is a numpy array, expected a tensor"),
    (mp.policy_loss, {"logprobs": None}, "logprobs is None"),
    (mp.policy_loss, {"logprobs": ONES.to_sparse()}, "layout torch.sparse_coo"),
    (mp.policy_loss, {"logprobs": ONES.long()}, "Fix: pass logprobs.float()"),
    (mp.policy_loss, {"logprobs": ONES.to(torch.float8_e4m3fn)}, "dtype torch.float8_e4m3fn"),
    (mp.policy_loss, {"old_logprobs": torch.zeros(N, 1)}, "old_logprobs has shape [3, 1]"),
    (mp.policy_loss, {"ref_logprobs": TWO}, "ref_logprobs has shape [2]"),
    (mp.policy_loss, {"cu_loss": CU[:-1]}, "cu_loss runs from 0 to 1 for 3 loss tokens"),
    (mp.policy_loss, {"cu_loss": CU.float()}, "dtype torch.float32, expected [B+1] int32"),
    (mp.policy_loss, {"cu_loss": tuple(CU)}, "cu_loss is of type tuple, expected a tensor"),
    (mp.policy_loss, {"advantages": [0.0] * 2}, "advantages is of type list"),
    (mp.policy_loss, {"advantages": TWO * 1j}, "advantages are torch.complex64"),
    (mp.policy_loss, {"advantages": torch.ones(4)}, "expected [2] (one per sample)"),
    (mp.policy_loss, {"advantages": TWO.to("meta")}, "advantages are on meta, cu_loss on cpu"),
    (mp.policy_loss, {"advantages": TWO, "per": "token"}, "expected [3] (one per loss token)"),
    (mp.policy_loss, {"advantages": torch.tensor([0.0, INF])}, "advantages[1] is inf"),
    (mp.policy_loss, {"old_logprobs": ONES * NAN}, "old_logprobs[0] is nan"),
    (mp.value_loss, {"returns": np.zeros(N)}, "returns is a numpy array"),
    (mp.gae, {"values": None}, "values is None, expected a tensor"),
    (mp.gae, {"values": TWO}, "values has shape [2]"),
    (mp.gae, {"bootstrap": [0.0, 0.0]}, "bootstrap is of type list, expected a tensor"),
    (mp.gae, {"bootstrap": TWO * 1j}, "torch.complex64"),
    (mp.discounted_returns, {"bootstrap": ONES}, "bootstrap has shape [3]"),
    (mp.discounted_returns, {"cu": [0, 2]}, "cu is of type list, expected a tensor"),
    (mp.discounted_returns, {"rewards": ONES.long()}, "dtype torch.int64"),
    (kl_divergence, {"logprobs": [1.0]}, "logprobs is of type list"),
    (kl_divergence, {"ref_logprobs": torch.ones(N, device="meta")}, "on meta"),
    (correction_weights, {"old_logprobs": np.ones(N)}, "old_logprobs is a numpy array"),
    (aggregate, {"cu_loss": torch.tensor([0, 2])}, "cu_loss runs from 0 to 2 for 3"),
    (mp.group_advantages, {"group_index": ["a", "a", "b"]}, "group_index is of type list"),
    (mp.group_advantages, {"group_index": GROUPS > 0}, "torch.bool"),
    (mp.group_advantages, {"group_index": GROUPS / 3}, "expected [3] integers"),
    (mp.group_advantages, {"group_index": GROUPS[:2]}, "expected [2] floats"),
    (mp.group_advantages, {"group_index": GROUPS.to("meta")}, "[3] floats on meta"),
    (mp.group_advantages, {"rewards": ONES.long()}, "dtype torch.int64"),
    (mp.group_advantages, {"rewards": torch.tensor([1e39, 0, 0]).double() * 10}, "rewards[0] is "),
    (mp.group_advantages, {"unit_index": ZEROS}, "unit_index has shape [3] and dtype torch.float"),
    (mp.group_advantages, {"unit_index": GROUPS.to("meta")}, "on meta, expected [3]"),
    (mp.group_advantages, {"unit_index": GROUPS * 0}, "of one unit"),
    (mp.group_advantages, {"num_tokens": GROUPS}, "num_tokens is given, but kind is 'grpo'"),
    (mp.group_advantages, OVER_BATCH | {"num_tokens": GROUPS - 1}, "num_tokens holds -1"),
    (mp.group_advantages, OVER_BATCH | {"num_tokens": GROUPS[:2]}, "num_tokens has shape [2]"),
    (mp.losses.turn_advantages, {"rewards": [0.0, 1.0, 0.0]}, "rewards is of type list"),
    (mp.losses.turn_advantages, {"rewards": torch.tensor([0, 0, NAN])}, "rewards[2] is nan"),
    (mp.losses.turn_advantages, {"cu_turns": CU + 1}, "cu_turns runs from 1 to 4"),
    (mp.losses.turn_advantages, {"group_index": TWO}, "expected [2] integers"),
    (mp.losses.turn_advantages, {"method": "gigpo"}, "anchor is None"),
    (mp.losses.turn_advantages, {"anchor": ANCHOR}, "anchor is given"),
    (mp.losses.turn_advantages, {"method": "gigpo", "anchor": ANCHOR[:2]}, "anchor has shape [2]"),
    # names
    (mp.policy_loss, {"kind": "reinforce"}, "kind is 'reinforce'. Fix: use one of grpo"),
    (mp.policy_loss, {"kind": np.zeros(2)}, "kind is a numpy array"),
    (mp.policy_loss, {"per": "turn"}, "per is 'turn'. Fix: use one of sample, token"),
    (mp.policy_loss, {"aggregation": "mean"}, "aggregation is 'mean'. Fix: use one of token_mean"),
    (mp.policy_loss, {"kl_kind": "k4", "ref_logprobs": ONES}, "kind is 'k4'. Fix: use one of k1"),
    (mp.policy_loss, ROLLOUT | {"correction": "is"}, "kind is 'is'. Fix: use one of tis, mis"),
    (mp.policy_loss, {"correction_level": None}, "correction_weights: level is None"),
    (mp.group_advantages, {"kind": torch.zeros(2, 2)}, "kind is of type Tensor"),
    (mp.losses.turn_advantages, {"kind": "gdpo"}, "kind is 'gdpo'"),
    # numbers
    (mp.policy_loss, {"scale": NAN}, "scale is nan, expected a finite number of 0 or more"),
    (mp.policy_loss, {"scale": torch.tensor(2.0)}, "scale is of type Tensor"),
    (mp.policy_loss, {"scale": 10**400}, "scale is too large for a float"),
    (mp.value_loss, {"scale": Fraction(1, 2)}, "scale is of type Fraction"),
    (mp.policy_loss, {"clip_low": -0.2}, "clip_low is -0.2, expected a number of 0 or more"),
    (mp.policy_loss, {"clip_high": NAN}, "clip_high is nan"),
    (mp.policy_loss, {"dual_clip": 1.0}, "dual_clip is 1.0, expected a finite number above 1"),
    (mp.policy_loss, {"kl_coef": -0.1, "ref_logprobs": ONES}, "kl_coef is -0.1"),
    (mp.policy_loss, {"entropy_coef": INF, "entropy": ONES}, "entropy_coef is inf"),
    (mp.policy_loss, {"correction_low": None}, "correction_weights: low is None"),
    (mp.policy_loss, ROLLOUT | {"correction": "tis", "correction_high": NAN}, "high is nan"),
    (mp.policy_loss, ROLLOUT | {"correction": "tis", "correction_low": 3.0}, "low is 3.0, high"),
    (mp.policy_loss, {"total_tokens": 2}, "total_tokens is 2, expected a finite number of 3"),
    (mp.policy_loss, {"total_tokens": torch.tensor(2)}, "total_tokens is 2, expected"),
    (mp.policy_loss, {"total_tokens": TWO}, "total_tokens has shape [2], expected one number"),
    (mp.policy_loss, {"total_samples": "5"}, "total_samples is of type str, expected"),
    (mp.policy_loss, norm(None), "max_tokens None"),
    (mp.policy_loss, norm(0), "max_tokens is 0, expected a finite number of 1 or more"),
    (mp.policy_loss, {"max_tokens": 5}, "aggregation is 'token_mean' and max_tokens 5"),
    (mp.value_loss, {"clip": -0.2, "old_values": ZEROS}, "clip is -0.2"),
    (mp.value_loss, {"clip": 0.2}, "old_values and clip must be passed together"),
    (mp.gae, {"gamma": 1.5}, "gamma is 1.5, expected a finite number of 0 or more up to 1"),
    (mp.gae, {"lam": None}, "lam is None"),
    (mp.group_advantages, {"eps": -1e-6}, "eps is -1e-06"),
    (mp.losses.turn_advantages, {"omega": INF}, "omega is inf"),
    (mp.linear_selected_logprobs, {"temperature": INF}, "temperature is inf, expected a finite"),
    (mp.linear_selected_logprobs, {"softcap": NAN}, "softcap is nan"),
    (mp.linear_selected_logprobs, {"memory_budget": NAN}, "memory_budget is nan"),
    (CostModel, {"pair": NAN}, "pair is nan"),
    (mp.plan, {"max_tokens": None}, "max_tokens is None"),
    (mp.plan, {"ranks": 0.5}, "ranks is 0.5"),
    # options and columns that go together
    (mp.policy_loss, {"kl_coef": 0.1}, "kl_coef is 0.1, but ref_logprobs is None"),
    (mp.policy_loss, {"entropy_coef": 0.1}, "entropy_coef is 0.1, but entropy is None"),
    (mp.policy_loss, {"correction": "tis"}, "correction is 'tis', but rollout_logprobs is None"),
    (mp.policy_loss, {"kl_kind": "k1"}, "kl_kind is 'k1', but ref_logprobs is None"),
    (mp.policy_loss, {"correction_high": 7.0}, "but correction is None"),
    (mp.policy_loss, {"dual_clip": 3.0, "kind": "cispo"}, "but cispo has no minimum"),
    (mp.policy_loss, {"dual_clip": 3.0, "kind": "gmpo"}, "but gmpo bounds a sample's ratio"),
    (mp.policy_loss, {"advantages": ONES, "kind": "gmpo"}, "but gmpo weighs whole samples"),
    (mp.group_advantages, {"kind": "gdpo"}, "rewards is of type Tensor and kind is 'gdpo'"),
    (mp.group_advantages, {"rewards": {"a": ONES}}, "rewards is of type dict and kind is 'grpo'"),
    (mp.group_advantages, {"kind": "pass_at_k"}, "k is None, expected a whole number"),
    (mp.group_advantages, {"k": 2}, "k is given, but kind is 'grpo'"),
    (mp.group_advantages, {"weights": {"a": 1.0}}, "weights is ['a'] for kind 'grpo'"),
    # scores and lengths
    (mp.group_numbers, {"names": "abc"}, "names is of type str"),
    (mp.group_numbers, {"names": torch.tensor(1)}, "names is of type Tensor"),
    (mp.group_numbers, {"names": [1]}, "names[0] is of type int"),
    (mp.losses.turns_of, {"samples": None}, "samples is NoneType"),
    (mp.losses.score_columns, {"scores": ONES}, "scores is of type Tensor"),
    (
        mp.losses.score_columns,
        {"scores": [[mp.schema.Cost("c", 1.0)]]},
        "scores[0][0] is of type Cost",
    ),
    (mp.losses.score_columns, {"scores": [[mp.Score("f", NAN)]]}, "'f' of sample 0 is nan"),
    (mp.losses.score_columns, {"scores": [*ONE, []]}, "sample 1 has no score 'f'"),
    (mp.losses.score_columns, {"names": "format"}, "names is of type str"),
    (mp.losses.score_columns, {"missing": NAN}, "missing is nan"),
    (mp.losses.score_advantages, {"scores": None}, "scores is None for a group_index of 1"),
    (
        mp.losses.score_advantages,
        {"group_index": [0, 1]},
        "scores is 1 lists for a group_index of 2",
    ),
    (mp.losses.score_advantages, {"group_index": ["a"]}, "<U1 of shape [1]"),
    (mp.losses.score_advantages, {"scores": [[mp.Score("f", 1e300)]]}, "which float32 can't hold"),
    (mp.losses.score_advantages, {"scores": [[mp.Score("f", NAN)]]}, "value is nan"),
    (mp.scatter_rewards, {"batch": [1]}, "batch is of type list, expected a PackedBatch"),
    (mp.losses.linear_length_scores, {"name": 3}, "name is of type int"),
    (mp.losses.linear_length_scores, {"alpha": NAN}, "alpha is nan"),
    (
        mp.losses.soft_overlong_scores,
        {"lengths": [1.5]},
        "lengths is of type list, float64 of shape",
    ),
    (
        mp.losses.soft_overlong_scores,
        {"lengths": [[1], [1, 2]]},
        "lengths is of type list, expected",
    ),
    (mp.losses.soft_overlong_scores, {"lengths": [-1]}, "lengths holds -1"),
    (mp.losses.soft_overlong_scores, {"buffer": 6}, "buffer is 6, max_length is 5"),
    (mp.losses.soft_overlong_scores, {"max_length": 5.5}, "max_length is 5.5, expected a whole"),
    (mp.losses.cosine_length_scores, {"correct": [1]}, "correct is of type list, int64 of shape"),
    (mp.losses.cosine_length_scores, {"correct": [True, False]}, "expected [1] bools"),
    (mp.losses.cosine_length_scores, {"wrong_to": None}, "wrong_to is None"),
    (mp.losses.group_length_scores, {"group_index": [0.5]}, "group_index is of type list, float64"),
    # teachers
    (mp.losses.teacher_divergence, {"logprobs": -TWO}, "logprobs has shape [2]"),
    (mp.losses.teacher_divergence, {"logprobs": ONES}, "logprobs[0] is 1.0, expected the log"),
    (
        mp.losses.teacher_divergence,
        {"teacher": (1, 2)},
        "teacher is of type tuple, expected a Scored",
    ),
    (
        mp.losses.teacher_divergence,
        {"teacher": mp.ops.ScoredSupport(TEACHER.offsets, TEACHER.ids, ONES)},
        "[0] is 1.0, expected",
    ),
    (
        mp.losses.teacher_divergence,
        {"kind": "reverse_kl", "tail": "ignore"},
        "by leaving the lists",
    ),
    (mp.losses.teacher_divergence, {"beta": 1}, "beta is 1, expected"),
    (mp.losses.teacher_divergence, {"min_logprob": 1.0}, "min_logprob is 1.0"),
    (mp.losses.teacher_divergence, {"max_divergence": 0.0}, "max_divergence is 0.0"),
    (mp.distillation_loss, {"logprobs": -ONES}, "logprobs is of type Tensor"),
    (mp.distillation_loss, {"logprobs": {}}, "logprobs are of none, but the teachers are '7B'"),
    (mp.distillation_loss, {"weights": {"8B": 1.0}}, "weights lacks '7B'"),
    (mp.distillation_loss, {"weights": {"7B": -1.0}}, "weights['7B'] is -1.0"),
    (mp.distillation_loss, {"weights": [1.0]}, "weights is of type list"),
    (mp.distillation_loss, {"token_weights": ONES}, "3 loss tokens"),
    (mp.distillation_loss, {"cu_loss": CU}, "for 2 loss tokens"),
    (mp.distillation_loss, {"scale": -1.0}, "scale is -1.0"),
    (mp.losses.teacher_logprobs, {"targets": torch.tensor([3])}, "has 2 lists for 1 targets"),
    (mp.losses.teacher_logprobs, {"targets": TWO}, "targets has shape [2] and dtype torch.float32"),
    (
        mp.losses.teacher_logprobs,
        {"targets": torch.tensor([3, 9])},
        "loss token 1 in teacher lacks its",
    ),
    (mp.losses.teacher_logprobs, {"otherwise": ONES}, "otherwise has shape [3]"),
    (mp.losses.teacher_advantages, {"teachers": TEACHER}, "teachers is of type ScoredSupport"),
    (mp.losses.teacher_advantages, {"logprobs": ONES}, "logprobs has shape [3]"),
    (mp.losses.teacher_advantages, {"max_advantage": 0.0}, "max_advantage is 0.0"),
]


@pytest.mark.parametrize(("call", "keywords", "says"), CASES)
def test_each_is_one_line_with_a_fix(call, keywords, says):
    with pytest.raises(ArgumentError) as error:
        call(**(CALLS[call] | keywords))
    message = str(error.value)
    assert says in message and "Fix: " in message and "\n" not in message


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: batch().unpack_tokens([1.0] * N), "unpack_tokens: x is of type list"),
        (lambda: batch().unpack_loss(None), "unpack_loss: x is None"),
        (lambda: mp.losses.gather_rewards(), "no columns"),
        (lambda: mp.losses.gather_rewards([1.0]), r"columns\[0\] is of type list"),
        (lambda: mp.losses.gather_rewards(ONES, TWO), r"columns\[1\] has shape \[2\]"),
        (lambda: mp.losses.turns_of([full_sample()]).columns(ZEROS), r"values has shape \[3\]"),
        (
            lambda: mp.losses.turns_of([full_sample()]).rewards(3),
            "rewards is of type int for 1 samples",
        ),
    ],
)
def test_methods_too(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), 0.5])
def test_numbers_of_numpy_are_numbers(value):
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


def test_logprobs_of_the_rollout_that_no_correction_reads():
    with pytest.warns(mp.errors.LossWarning, match="correction is None.* Fix: ") as caught:
        mp.policy_loss(ONES, TWO, CU, rollout_logprobs=ZEROS)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.policy_loss(ONES, TWO, CU, rollout_logprobs=ZEROS, correction="tis")
        mp.policy_loss(ONES, TWO, CU)
