"""Attention by fixed blocks on a CPU: float64's values, and the same bits alone, packed and behind a prefix."""

import pytest
import torch
from support.fixed_blocks import (
    assert_sequences_have_their_own_bits,
    assert_shared_rows_have_their_own_bits,
    assert_values,
)

from mmpack.errors import BackendError
from mmpack.ops import invariance
from mmpack.ops.attention import TREE, plan_sequences, sequence_attention
from mmpack.ops.attention.choose import SEQUENCES

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# of a block of 64: less, exactly, one more, several
LENGTHS = [1, 63, 64, 65, 190, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype):
    assert_values(CPU, dtype, LENGTHS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequences_bits_are_its_own(dtype):
    assert_sequences_have_their_own_bits(CPU, dtype, LENGTHS)


@pytest.mark.parametrize("prompt", [1, 63, 64, 100])
def test_a_branchs_bits_are_its_own(prompt):
    assert_shared_rows_have_their_own_bits(CPU, torch.float32, prompt, [1, 64, 100])


def test_rows_that_see_both_ways():
    """A tower's sequences: beside sdpa, and each by itself."""
    lengths = [30, 64, 1, 70]
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 24)
    found = sequence_attention(q, k, v, plan_sequences(lengths), backend="fixed_blocks")
    expected = sequence_attention(q.double(), k.double(), v.double(), plan_sequences(lengths))
    assert (found - expected).abs().max() <= 1e-5
    start = 0
    for n in lengths:
        rows = slice(start, start := start + n)
        part = (x[:, :, rows] for x in (q, k, v))
        alone = sequence_attention(*part, plan_sequences([n]), backend="fixed_blocks")
        assert torch.equal(alone, found[:, rows])


def test_it_runs_anywhere_and_only_by_name():
    for chooser in TREE, SEQUENCES:
        assert chooser.why_not("fixed_blocks", CPU, torch.float32, 80) is None
        assert "no dropout" in chooser.why_not("fixed_blocks", CPU, torch.float32, 80, 0.1)
        assert "heads of 512" in chooser.why_not("fixed_blocks", CPU, torch.float32, 512)
        assert chooser.wanted() == "auto"
        invariance.enter()
        try:
            assert chooser.wanted() == "fixed_blocks"
            with pytest.raises(BackendError, match="no dropout"):
                chooser.choices(plan_sequences([3]), CPU, 80, 0.1)
        finally:
            invariance.leave()
