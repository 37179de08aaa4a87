"""The gated delta rule over forests, held to transformers' own, token by token in float64, on each path by itself."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.linear_attention import (
    OFFSETS,
    PARENTS,
    assert_near,
    for_each_value_head,
    forests,
    inputs,
    of_transformers,
    rule_alone,
    values_and_gradients,
)

from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.linear_attention import plan_segments, segment_delta_rule


def plan_of(offsets, parents, **options):
    return plan_segments(np.array(offsets), np.array(parents), **options)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "bound"),
    [
        ((2, 4), (16, 24), torch.float64, 1e-13),
        ((2, 4), (16, 24), torch.float32, 2e-6),
        ((3, 3), (32, 8), torch.float32, 2e-6),
        ((2, 4), (16, 16), torch.bfloat16, 1e-2),
    ],
)
def test_a_forest_is_its_paths_alone(heads, dims, dtype, bound):
    tensors = inputs(222, heads, dims, dtype=dtype)
    plan = plan_of(OFFSETS, PARENTS)
    upstream = torch.randn(222, heads[1], dims[1], generator=torch.Generator().manual_seed(1))
    found = values_and_gradients(lambda x: segment_delta_rule(*x, plan), tensors, upstream)
    wanted = values_and_gradients(
        lambda x: rule_alone(x, OFFSETS, PARENTS), [x.double() for x in tensors], upstream
    )
    assert found[0].dtype == dtype
    assert_near(found, wanted, bound)


@pytest.mark.parametrize(("strong", "share"), [(False, 1.5), (True, 0.1)])
def test_beside_the_chunks_of_transformers(strong, share):
    """As exact in float32; and more so where strong decays stand between weak ones, which float32 sums swallow."""
    tensors = inputs(200, (2, 4), (16, 16))
    if strong:
        often = torch.rand(200, 4, generator=torch.Generator().manual_seed(2)) < 0.2
        tensors[3] = torch.where(often, -80.0, -0.02)
    exact = rule_alone(tensors, [0, 200], [-1])
    chunked = of_transformers("torch_chunk_gated_delta_rule")
    theirs = getattr(chunked, "__wrapped__", chunked)(
        *for_each_value_head(x[None] for x in tensors), use_qk_l2norm_in_kernel=True
    )[0][0]
    ours = segment_delta_rule(*tensors, plan_of([0, 200], [-1]))
    assert (ours - exact).norm() <= share * (theirs - exact).norm()


@settings(max_examples=15)
@given(forests(7, st.sampled_from([0, 1, 2, 3, 5, 63, 64, 65])))
def test_any_forest(forest):
    offsets, parents = forest
    tensors = inputs(offsets[-1], (1, 2), (4, 6), dtype=torch.float64)
    found = segment_delta_rule(*tensors, plan_of(offsets, parents))
    if offsets[-1]:
        wanted = rule_alone(tensors, offsets, parents, recurrent=False)
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    else:
        assert found.shape == (0, 2, 6)


@pytest.mark.parametrize("parents", [[-1, -1, 1], [-1, 0, -1], [-1, 0, 1]])
def test_another_parent_gives_other_values(parents):
    """What holds the tests above to the state: a branch of another parent is seen."""
    tensors = inputs(30, (1, 2), (8, 8), dtype=torch.float64)
    offsets = [0, 10, 20, 30]
    wanted = rule_alone(tensors, offsets, [-1, 0, 0])
    assert torch.allclose(segment_delta_rule(*tensors, plan_of(offsets, [-1, 0, 0])), wanted)
    leaked = segment_delta_rule(*tensors, plan_of(offsets, parents))
    assert (leaked - wanted).abs().max() > 1e-2


def test_a_plain_sample_has_the_bits_that_it_has_alone():
    lengths = [1200, 70, 130, 1, 63, 64, 5]
    offsets = [0, *np.cumsum(lengths).tolist()]
    tensors = inputs(offsets[-1], (2, 4), (16, 16))
    upstream = torch.randn(offsets[-1], 4, 16, generator=torch.Generator().manual_seed(1))
    plan = plan_of(offsets, [-1] * len(lengths))
    packed = values_and_gradients(lambda x: segment_delta_rule(*x, plan), tensors, upstream)
    for start, stop in itertools.pairwise(offsets):
        own = plan_of([0, stop - start], [-1])
        alone = values_and_gradients(
            lambda x, own=own: segment_delta_rule(*x, own),
            [x[start:stop] for x in tensors],
            upstream[start:stop],
        )
        assert all(torch.equal(a[start:stop], b) for a, b in zip(packed, alone, strict=True))


def test_padding_is_apart():
    """Before and after a segment's tokens, and at the end; NaN in it stays there."""
    padding = np.zeros(100, dtype=bool)
    padding[[0, 1, 38, 39]] = True
    padding[80:] = True
    tensors = inputs(100, (1, 2), (4, 6), dtype=torch.float64)
    for x in tensors:
        x[torch.from_numpy(padding)] = torch.nan
    found = segment_delta_rule(*tensors, plan_of([0, 40, 80], [-1, -1], padding=padding))
    for start, stop in ((2, 38), (40, 80)):
        part = [x[start:stop] for x in tensors]
        wanted = rule_alone(part, [0, stop - start], [-1])
        assert torch.allclose(found[start:stop], wanted, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients():
    tensors = [x.requires_grad_() for x in inputs(9, (1, 1), (2, 2), dtype=torch.float64)]
    plan = plan_of([0, 4, 7, 9], [-1, 0, 0])
    assert torch.autograd.gradgradcheck(
        lambda *x: segment_delta_rule(*x, plan), tensors, fast_mode=True
    )


def test_without_norm_and_with_a_scale():
    tensors = inputs(20, (1, 1), (4, 4), dtype=torch.float64)
    plan = plan_of([0, 20], [-1])
    normed = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in tensors[:2]]
    found = segment_delta_rule(*normed, *tensors[2:], plan, scale=3.0, qk_l2norm=False)
    wanted = segment_delta_rule(*tensors, plan) * 3 * 2
    assert torch.allclose(found, wanted, rtol=1e-12)


def test_refusals():
    tensors = inputs(20, (1, 2), (4, 4))
    plan = plan_of([0, 20], [-1])
    for changed, options, error, message in (
        ([x[:19] for x in tensors], {}, ArgumentError, "plan is for 20 rows, but there are 19"),
        ([x[None] for x in tensors], {}, ArgumentError, r"q has shape \[1, 20, 1, 4\]"),
        (tensors, {"scale": float("nan")}, ArgumentError, "scale"),
        (tensors, {"backend": "fast"}, BackendError, "'fast' is not a backend"),
    ):
        with pytest.raises(error, match=message):
            segment_delta_rule(*changed, plan, **options)
