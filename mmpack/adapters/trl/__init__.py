"""TRL 1.16: a real `GRPOTrainer` on packed, prefix-shared batches, and its batches as samples and back.

Run with trl 1.16.0, transformers 5.23.0, deepspeed 0.19.8.
"""

from mmpack.errors import needs

with needs("trl", __name__):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from mmpack.adapters.trl.async_grpo import MmpackAsyncGRPO
from mmpack.adapters.trl.convert import from_batch, to_samples
from mmpack.adapters.trl.grpo import MmpackGRPO
from mmpack.adapters.trl.rollouts import to_trajectories

__all__ = ["MmpackAsyncGRPO", "MmpackGRPO", "from_batch", "to_samples", "to_trajectories"]
