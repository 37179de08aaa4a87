"""Where kernels run in tests: on a GPU if there is one, else interpreted on the CPU (TRITON_INTERPRET=1)."""

import pytest
import torch


@pytest.fixture
def device(monkeypatch) -> torch.device:
    monkeypatch.setenv("MMPACK_BACKEND", "triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
