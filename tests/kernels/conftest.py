"""Where kernels run in tests: on a GPU if there is one, else interpreted on the CPU (TRITON_INTERPRET=1)."""

import pytest
import torch
from support.native import device_of


@pytest.fixture
def device(monkeypatch) -> torch.device:
    monkeypatch.setenv("MMPACK_BACKEND", "triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def backend_device(request, monkeypatch) -> torch.device:
    """The device that `support.native.each_backend`'s backend runs on; that backend is forced."""
    monkeypatch.setenv("MMPACK_BACKEND", request.param)
    return device_of(request.param)
