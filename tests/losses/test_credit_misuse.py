"""Wrong arguments to the functions of credit: an ArgumentError that names them, with a fix."""

import numpy as np
import pytest
import torch

import mmpack as mp

NAN = float("nan")
ONE = mp.Score("f", 1.0)
R, CU, GROUP = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 2, 4]), torch.tensor([0, 0])
ANCHOR = torch.tensor([1, 1, 2, 2])


def turn(rewards=R, cu=CU, group=GROUP, method="returns", **options):
    return mp.turn_advantages(rewards, cu, group, method, **options)


def turns():
    ids, loss = np.arange(5, 9), [mp.LossSpan(2, 4)]
    return mp.turns_of([mp.Sample("s", "g", "qwen2_vl", ids, [], [], loss)])


CALLS = {
    "rewards is of type list": lambda: turn([0.0, 1.0, 0.0, 0.0]),
    "rewards is a numpy array": lambda: turn(R.numpy()),
    "cu_turns is of type list": lambda: turn(cu=[0, 2, 4]),
    "group_index is of type list, expected a tensor": lambda: turn(group=[0, 0]),
    "turn_advantages: rewards[2] is nan": lambda: turn(torch.tensor([0, 0, NAN, 0])),
    "turn_advantages: rewards[3] is nan": lambda: turn(
        torch.tensor([0, 0, 0, NAN]), method="trajectory"
    ),
    "turn_advantages: rewards[1] is inf": lambda: turn(
        torch.tensor([0, 1e39, 0, 0]).double() * 10, method="process"
    ),
    "cu_turns runs from 0 to 5": lambda: turn(cu=torch.tensor([0, 2, 5])),
    "dtype torch.int64, expected [4] floats": lambda: turn(R.long()),
    "expected [2] integers": lambda: turn(group=GROUP.float()),
    "group_index has shape [1]": lambda: turn(group=GROUP[:1]),
    "torch.int64 on meta": lambda: turn(group=GROUP.to("meta")),
    "rewards is on meta": lambda: turn(R.to("meta")),
    "anchor is None": lambda: turn(method="gigpo"),
    "anchor is given": lambda: turn(anchor=ANCHOR),
    "anchor has shape [2]": lambda: turn(method="gigpo", anchor=ANCHOR[:2]),
    "gamma is nan": lambda: turn(gamma=NAN),
    "gamma is of type Tensor": lambda: turn(gamma=torch.tensor(0.5)),
    "omega is inf": lambda: turn(method="gigpo", anchor=ANCHOR, omega=float("inf")),
    "kind is 'gdpo'": lambda: turn(kind="gdpo"),
    "names is of type str": lambda: mp.group_numbers("abc"),
    "names is of type Tensor": lambda: mp.group_numbers(torch.tensor(1)),
    "names[0] is of type int": lambda: mp.group_numbers([1]),
    "samples is NoneType": lambda: mp.turns_of(None),
    "samples[0] is int": lambda: mp.turns_of([1]),
    "values is of type list": lambda: turns().columns([1.0]),
    "values has shape [2]": lambda: turns().columns(torch.zeros(2)),
    "rewards is of type int for 1 samples": lambda: turns().rewards(3),
    "'reward' of sample 's' is nan": lambda: turns().rewards([NAN]),
    "scores is of type Tensor": lambda: mp.score_columns(torch.ones(2)),
    "scores[0][0] is of type Cost": lambda: mp.score_columns([[mp.Cost("c", 1.0)]]),
    "'f' of sample 0 is nan": lambda: mp.score_columns([[mp.Score("f", NAN)]]),
    "score_columns: names is of type str": lambda: mp.score_columns([[ONE]], "format", 0.0),
    "names is of type int": lambda: mp.score_columns([[ONE]], 3),
    "names is of type list": lambda: mp.score_columns([[ONE]], [["f"]]),
    "missing is nan": lambda: mp.score_columns([[ONE], []], missing=NAN),
    "scores is None for a group_index of 1": lambda: mp.score_advantages(None, [0]),
    "scores is of type str": lambda: mp.score_advantages("ab", [0, 0]),
    "scores is 1 lists for a group_index of 2": lambda: mp.score_advantages([[ONE]], [0, 1]),
    "<U1 of shape [1]": lambda: mp.score_advantages([[ONE]], ["a"]),
    "of type list, expected [B] integers": lambda: mp.score_advantages([[ONE]] * 2, [[0], [0, 1]]),
    "object of shape [1]": lambda: mp.score_advantages([[ONE]], [2**70]),
    "complex64 of shape [1]": lambda: mp.score_advantages([[ONE]], torch.tensor([1j])),
    "which float32 can't hold": lambda: mp.score_advantages([[mp.Score("f", 1e300)]], [0]),
    "columns[0] is of type list": lambda: mp.gather_rewards([1.0]),
    "columns[1] is None": lambda: mp.gather_rewards(R, None),
    "columns[0] has shape [1, 4]": lambda: mp.gather_rewards(R[None]),
    "columns[1] has shape [4] on meta": lambda: mp.gather_rewards(R, R.to("meta")),
    "unit_index is on meta": lambda: mp.group_advantages(R, ANCHOR, unit_index=ANCHOR.to("meta")),
    "linear_length_scores: name is of type int": lambda: mp.linear_length_scores([1], 3, name=3),
}


@pytest.mark.parametrize("says", CALLS)
def test_wrong_arguments_are_named(says):
    with pytest.raises(mp.ArgumentError) as error:
        CALLS[says]()
    assert says in str(error.value) and "Fix: " in str(error.value)
    assert "\n" not in str(error.value)


def test_one_score_is_a_list_of_one():
    near, far = mp.Score("iou", 0.75), mp.Score("iou", 0.25)
    got = mp.score_advantages([near, [far]], np.array([3, 3]), "dr_grpo")
    assert [[s.value for s in of] for of in got] == [[0.25], [-0.25]]
    assert mp.score_columns([near, [far]])["iou"].tolist() == [0.75, 0.25]


def test_gathered_columns_have_no_gradient_in_one_process_either():
    (column, _) = mp.gather_rewards(R.clone().requires_grad_())
    assert not column.requires_grad


def test_no_group_is_as_large_as_k():
    got = mp.group_advantages(R, torch.zeros(4).long(), "pass_at_k", k=10**30)
    assert not got.any()
