"""Equality of what frameworks hold, bit for bit: of tensors, arrays, and of dicts and lists of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def assert_equal(x: Any, y: Any, where: str = "", ordered: bool = False) -> None:
    """`x` is `y`: types, dtypes, shapes, bits; NaN equals NaN. `ordered`: so are the keys of dicts."""
    assert type(x) is type(y), where
    if isinstance(y, torch.Tensor):
        assert x.dtype == y.dtype and x.shape == y.shape, where
        bits = [t.reshape(-1).clone().view(torch.uint8) for t in (x, y) if t.numel()]
        assert not bits or torch.equal(*bits), where
    elif isinstance(y, np.ndarray) and y.dtype != object:
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), where
    elif isinstance(y, dict):
        assert x.keys() == y.keys() and (not ordered or list(x) == list(y)), where
        for name, value in y.items():
            assert_equal(x[name], value, f"{where}.{name}", ordered)
    elif isinstance(y, list | tuple | np.ndarray):
        assert len(x) == len(y), where
        for k, (a, b) in enumerate(zip(x, y, strict=True)):
            assert_equal(a, b, f"{where}[{k}]", ordered)
    elif isinstance(y, float | np.floating):
        assert x == y or (np.isnan(x) and np.isnan(y)), where
    else:
        assert x == y, where
