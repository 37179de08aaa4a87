"""TRL: its real trainers (GRPO, RLOO, DPO, SFT) on packed, prefix-shared batches, and GRPO's batches as samples.

Run with trl 1.12.0, 1.16.0, transformers 5.24.0, deepspeed 0.19.8.
"""

from mmpack.errors import needs

with needs("trl", __name__):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from mmpack.adapters.trl.async_grpo import MmpackAsyncGRPO
from mmpack.adapters.trl.convert import from_batch, to_samples
from mmpack.adapters.trl.grpo import MmpackGRPO, MmpackRLOO
from mmpack.adapters.trl.rollouts import to_trajectories
from mmpack.adapters.trl.supervised import MmpackDPO, MmpackSFT

__all__ = [
    "MmpackAsyncGRPO",
    "MmpackDPO",
    "MmpackGRPO",
    "MmpackRLOO",
    "MmpackSFT",
    "from_batch",
    "to_samples",
    "to_trajectories",
]
