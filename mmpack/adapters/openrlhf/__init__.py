"""OpenRLHF 0.11: its Experience as samples and back, and its Actor's passes on packed, prefix-shared batches.

`python -m mmpack.adapters.openrlhf` in the place of `python -m openrlhf.cli.train_ppo_ray` does the second: see
`strategy.py`. For an `Actor` of one's own: `use(actor)`.

Run with openrlhf 0.11.2, transformers 5.15.0, deepspeed 0.19.8.
"""

from mmpack.errors import needs

with needs("openrlhf", __name__):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from mmpack.adapters.openrlhf.actor import use
from mmpack.adapters.openrlhf.experience import from_batch, from_samples, to_samples

__all__ = ["from_batch", "from_samples", "to_samples", "use"]
