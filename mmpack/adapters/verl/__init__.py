"""verl (0.9): its DataProto as samples and back, and its actor's logprobs on packed, prefix-shared batches.

One line of configuration, `actor_rollout_ref.model.external_lib=mmpack.adapters.verl.enable`, or one call,
`use(engine)`.

Run with verl 0.9.1, transformers 5.9.0.
"""

from typing import Any

from mmpack.errors import needs

with needs("verl", __name__):
    import torch  # noqa: F401

from mmpack.adapters.verl.agent_loop import to_trajectories
from mmpack.adapters.verl.data import from_batch, to_samples

__all__ = ["from_batch", "to_samples", "to_trajectories", "use"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "use":  # imports transformers
        with needs("verl", __name__):
            from mmpack.adapters.verl.engine import use
        return use
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
