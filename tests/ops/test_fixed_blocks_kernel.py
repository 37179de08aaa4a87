"""The kernels of fixed blocks: float64's values, and the same bits alone, packed and behind a prefix."""

import pytest
import torch
from support.fixed_blocks import (
    assert_sequences_have_their_own_bits,
    assert_shared_rows_have_their_own_bits,
    assert_values,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.bfloat16]


def lengths(device):
    """Of blocks of 16 rows in the interpreter, of 32 to 128 on a GPU."""
    return [1, 16, 17, 40, 3] if device.type == "cpu" else [1, 127, 128, 129, 700, 64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device, dtype, no_tf32):
    assert_values(device, dtype, lengths(device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequences_bits_are_its_own(device, dtype, no_tf32):
    assert_sequences_have_their_own_bits(device, dtype, lengths(device))


@pytest.mark.parametrize("prompt", [1, 16, 37])
def test_a_branchs_bits_are_its_own(device, prompt, no_tf32):
    assert_shared_rows_have_their_own_bits(device, torch.bfloat16, prompt, [1, 17, 30])
