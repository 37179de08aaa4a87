"""The kernel of mmpack::teacher_divergence against plain torch in float64: interpreted here, or on a GPU."""

import pytest
import torch

import mmpack as mp
from mmpack.losses.distillation.call import Columns, Options
from mmpack.losses.distillation.torch import divergence as in_torch
from mmpack.ops.logprobs.support import ScoredSupport
from tests.support.kept_ids import some
from tests.support.teachers import divergence, draw_lists, scored

pytest.importorskip("triton")
from mmpack.losses.distillation import triton as module

pytestmark = pytest.mark.kernel

CASES = [
    (kind, tail)
    for kind in ("forward_kl", "reverse_kl", "jsd")
    for tail in ("bucket", "renormalize", "ignore")
    if (kind, tail) != ("reverse_kl", "ignore")
]
each_case = pytest.mark.parametrize(("kind", "tail"), CASES)
NONE = -float("inf")


def problem(device, count=20, vocab=300, longest=150, spread=2.0):
    """Lists of none to several hundred ids."""
    if device.type == "cuda":
        count = 700
    teacher = torch.randn(count, vocab) * spread
    lists = draw_lists(count, vocab, longest, 0.2)
    own = scored(lists, teacher + torch.randn(count, vocab)).logprobs
    return own.to(device), scored(lists, teacher).to(device)


@each_case
@pytest.mark.parametrize("least", [NONE, -5.0])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_values_masses_and_derivatives(device, kind, tail, least, spread):
    own, teacher = problem(device, spread=spread)
    columns = Columns(own, teacher.logprobs, teacher.offsets)
    options = Options(kind, tail, 0.3, least)
    values, masses, slopes = module.divergence(columns, options)
    expected, of_lists, derivatives = in_torch(columns, options)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(masses, of_lists, rtol=1e-12, atol=0)
    torch.testing.assert_close(slopes, derivatives, rtol=1e-6, atol=1e-9)


@each_case
def test_against_kl_div(device, kind, tail):
    own, teacher = problem(device)
    leaf, wide = own.clone().requires_grad_(), own.double().requires_grad_()
    got = mp.teacher_divergence(leaf, teacher, kind, tail)
    want = divergence(wide, teacher, kind, tail)
    if (kind, tail) == ("forward_kl", "ignore"):
        want = want.clamp(min=0)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    up = torch.randn(got.shape, dtype=torch.float64, device=device)
    got.backward(up)
    want.backward(up)
    assert (leaf.grad - wide.grad).abs().max() <= 1e-6 * wide.grad.abs().max()


@each_case
def test_bits_do_not_depend_on_the_batch(device, kind, tail):
    own, teacher = problem(device)
    options = Options(kind, tail, 0.5, NONE)
    columns = Columns(own, teacher.logprobs, teacher.offsets)
    values, masses, slopes = module.divergence(columns, options)
    order = torch.randperm(len(teacher))[: len(teacher) // 2]
    names = ScoredSupport(teacher.offsets, torch.arange(len(own), device=device), own)
    part = some(names, order)
    columns = Columns(own[part.ids], teacher.logprobs[part.ids], part.offsets)
    again = module.divergence(columns, options)
    assert torch.equal(again[0], values[order.to(device)])
    assert torch.equal(again[1], masses[:, order.to(device)])
    assert torch.equal(again[2], slopes[part.ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(device, dtype):
    own, teacher = problem(device)
    columns = Columns(own.to(dtype), teacher.logprobs, teacher.offsets)
    options = Options("jsd", "bucket", 0.5, NONE)
    got, want = module.divergence(columns, options), in_torch(columns, options)
    assert got[2].dtype == want[2].dtype
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_impossible_ids_and_nan(device):
    low, nan = NONE, torch.nan
    offsets = torch.tensor([0, 2, 2, 4, 6])
    scores = torch.tensor([-0.5, -1.5, -0.5, low, -0.5, -1.0])
    own = torch.tensor([-0.5, low, -0.5, -2.0, nan, -1.0])
    columns = Columns(own.to(device), scores.to(device), offsets.to(device))
    for case in CASES:
        options = Options(*case, 0.5, NONE)
        for a, b in zip(
            module.divergence(columns, options), in_torch(columns, options), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_offsets_beyond_the_ids_are_not_followed(device):
    own, teacher = problem(device)
    wild = teacher.offsets.clone()
    wild[3:] += len(own)
    values, _, _ = module.divergence(
        Columns(own, teacher.logprobs, wild), Options("forward_kl", "bucket", 0.5, NONE)
    )
    assert torch.equal(values[4:], torch.zeros_like(values[4:]))


def test_no_list_and_no_token(device):
    for offsets in ([0], [0, 0, 0]):
        columns = Columns(
            torch.zeros(0, device=device),
            torch.zeros(0, device=device),
            torch.tensor(offsets, device=device),
        )
        for case in CASES:
            values, masses, slopes = module.divergence(columns, Options(*case, 0.5, NONE))
            assert torch.equal(values, torch.zeros_like(values)) and not masses.any()
            assert slopes.shape == (0,)


def test_registered_op_obeys_the_rules_of_torch(device):
    from mmpack.losses.distillation.autograd import divergence_op

    own, teacher = problem(device)
    arguments = own, teacher.logprobs, teacher.offsets, "jsd", "bucket", 0.5, -10.0
    torch.library.opcheck(divergence_op, arguments)
