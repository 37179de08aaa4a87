"""vime and slime: their Sample as samples and back, and their trainer's logprobs, ratio, KL and loss by mmpack.

One flag does the second, `--custom-megatron-init-path mmpack.adapters.vime.enable`. Its parts have flags of their own:
`--custom-loss-function-path mmpack.adapters.vime.objective.loss`, and vime's
`--linear-logp-provider mmpack.adapters.vime.linear_logp.provider`.
Megatron's layers run shared packs with two more flags: see `mmpack.adapters.vime.sharing`.

Run with slime's sources of August 2026, and stand-ins of their hooks.
"""

from mmpack.errors import needs

with needs("hf", __name__):
    import torch  # noqa: F401

from mmpack.adapters.vime.enabling import enable
from mmpack.adapters.vime.samples import from_batch, from_samples, to_samples

__all__ = ["enable", "from_batch", "from_samples", "to_samples"]
