"""torch: batches on the device, made while the device works."""

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.adapters.torch.loader import PackLoader
from mmpack.adapters.torch.step import Step

__all__ = ["PackLoader", "Step"]
