"""The functions of the table of tolerances take floats, numpy and torch."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from mmpack import contracts


@pytest.mark.parametrize(
    "make", [float, np.float64, lambda x: torch.tensor(x, dtype=torch.float64)]
)
def test_selected_logprob_bound(make):
    assert float(contracts.selected_logprob_bound(make(-1e4))) == pytest.approx(1e-5 + 1e4 / 2**22)
    assert float(contracts.selected_logprob_bound(make(0.0))) == 1e-5


def test_bounds_grow_with_what_they_are_of():
    for peak, bound in ((0.0, 1e-4), (50.0, 1e-4), (100.0, 2e-4), (1e4, 2e-2)):
        assert contracts.linear_logprob_bound(peak) == pytest.approx(bound)
    assert contracts.loss_bound(30.0, 10) == pytest.approx(3e-6)
    assert contracts.gradient_fp32_bound(-2.0) == pytest.approx(2e-5)
    assert contracts.linear_gradient_fp32_bound(3.0, 20.0) == pytest.approx(3e-5)
    assert contracts.linear_gradient_fp32_bound(3.0, 500.0) == pytest.approx(3e-4)
    for separate, bound in ((0.0, 2e-6), (1e-6, 2e-6), (4e-6, 6e-6), (8e-6, 1e-5), (1.0, 1e-5)):
        assert contracts.parameter_gradient_fp32_bound(separate) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("separate", "half", "share", "bound"),
    [
        (0.0, False, "vs_separate", 2e-6),
        (1.0, False, "vs_separate", 1.5),
        (1.0, False, "of_a_kind", 3.0),
        (1e-3, True, "of_a_kind", 5e-3),
        (1e-2, True, "vs_separate", 1.5e-2),
        (float("nan"), True, "vs_separate", 5e-3),
        (float("inf"), False, "of_a_kind", 2e-6),
    ],
)
def test_parameter_gradient_bound_of_all_and_of_a_kind(separate, half, share, bound):
    share = f"parameter_gradient_{share}"
    assert contracts.parameter_gradient_bound(separate, half=half, share=share) == pytest.approx(
        bound
    )


def test_rows_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        contracts.TOLERANCES["loss"].value = 1.0


def test_needs_neither_torch_nor_numpy():
    code = (
        "import mmpack.contracts, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
