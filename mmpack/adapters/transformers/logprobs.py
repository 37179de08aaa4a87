"""Log-probabilities of a batch's loss tokens: forward to the hidden states, logits never made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch

from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.unwrap import is_sharded, unwrap
from mmpack.errors import ModelError
from mmpack.ops.linear_selected_logprobs import linear_selected_logprobs
from mmpack.pack.batch import Batch


@overload
def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def packed_logprobs(
    model: Any, batch: Batch, temperature: float = 1.0, vision: str = "auto", *, entropy: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """float32 [N]: log p of each loss token under `model`, of a packed or a padded batch; differentiable.

    Args: `temperature`: logits are divided by it. `vision`: see `model_inputs`. `entropy`: return also the entropy
    in nats [N] of the distribution that each loss token is of.
    """
    whole = unwrap(model, "packed_logprobs")
    head = whole.get_output_embeddings()
    if not _is_linear(head):
        raise ModelError(
            f"packed_logprobs: the head is a {type(head).__name__}, and only a plain Linear can be read "
            "by its weight. Fix: merge the adapter, or make logits and use mp.selected_logprobs"
        )

    def read(hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return linear_selected_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            head.weight,
            batch.loss_targets,
            rows=batch.loss_rows,
            bias=head.bias,
            temperature=temperature,
            entropy=entropy,
            rows_unique=batch.loss_rows_unique,
            row_inverse=batch.loss_row_inverse,
        )

    inputs = model_inputs(batch, whole, vision)
    if not is_sharded(whole):
        return read(whole.model(**inputs).last_hidden_state)

    def read_as_logits(hidden: torch.Tensor) -> torch.Tensor:
        values = read(hidden)
        both = (values, torch.zeros_like(values)) if torch.is_tensor(values) else values
        return torch.complex(*both)

    # The weights are whole inside the outermost forward alone, and what it returns is what FSDP watches. Complex
    # numbers pass as they are: real ones it casts to a policy's output_dtype.
    with _forward_of(head, read_as_logits):
        values = model(**inputs).logits
    logprobs = values.real.contiguous()
    return (logprobs, values.imag.contiguous()) if entropy else logprobs


@contextlib.contextmanager
def _forward_of(module: Any, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Another forward for a while; the module may have one of its own already, as accelerate's hooks set it."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _is_linear(head: Any) -> bool:
    """Whether the head's weight and bias say all; `fully_shard` makes a class of its own."""
    kinds = [k for k in type(head).__mro__ if not k.__module__.startswith("torch.distributed.")]
    return kinds[0] is torch.nn.Linear
