"""Layers whose forward takes the place of a model's, as the package `kernels` puts it there."""

import torch

from mmpack.ops.norms.rms import rms_norm


class RMSNorm(torch.nn.Module):
    """RMSNorm of Llama's kind, with its gradient; a row's bits do not depend on its batch."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


__all__ = ["RMSNorm"]
