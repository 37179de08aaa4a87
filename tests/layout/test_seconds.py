"""What an engine's cast leaves of a video's step in time, against torch's own cast."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.layout.seconds import DTYPES, seconds_in


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    st.floats(0, 1e5) | st.floats(0, allow_infinity=False) | st.sampled_from([13 / 12, 1 + 2**-8])
)
def test_as_torch_casts(dtype, seconds):
    wanted = torch.tensor([seconds], dtype=torch.float32).to(getattr(torch, dtype)).item()
    assert seconds_in(seconds, dtype) == wanted
