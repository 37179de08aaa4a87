"""torch: batches on the device, made while the device works.

Run with torch 2.13.0.
"""

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.adapters.torch.batches import PackBatches
from mmpack.adapters.torch.loader import PackLoader
from mmpack.adapters.torch.stream import GroupedSteps

__all__ = ["GroupedSteps", "PackBatches", "PackLoader"]
