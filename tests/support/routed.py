"""An engine whose routers choose by other numerics than the trainer's, written beside transformers' routers.

Its choice is made of logits plus noise; what the experts weigh is the softmax of the logits, as in the trainer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.models import Gradients, logprobs_and_gradients, small_model
from torch.overrides import TorchFunctionMode

import mmpack as mp
from mmpack.schema.sample import Sample

EXPERTS, CHOSEN = 8, 2
LONGEST = 256  # tokens


def routed_model(family: str = "qwen3_vl_moe") -> Any:
    """A small model in float64 in which another expert is another answer."""
    model = small_model(family).double()
    model.config.get_text_config()._experts_implementation = "eager"  # grouped: no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and "experts" in name:
                parameter.mul_(12)
    return model


class Forced(TorchFunctionMode):
    """The router's own code, in which the choice of k out of all experts is made before."""

    def __init__(self, ids, experts):
        super().__init__()
        self.ids, self.experts = ids, experts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk" and args[0].shape == (
            len(self.ids),
            self.experts,
        ):
            return args[0].gather(-1, self.ids), self.ids
        return out


class Engine:
    """Logprobs and routes of one sample at a time, by itself and unpacked."""

    def __init__(self, model: Any):
        self.model = copy.deepcopy(model)
        routers = [m for m in self.model.modules() if type(m).__name__.endswith("TopKRouter")]
        self.taken: list[Any] = [None] * len(routers)
        self.noise: list[Any] = [0.0] * len(routers)
        for k, router in enumerate(routers):
            router.forward = self._forward_of(router, k)

    def _forward_of(self, router: Any, k: int) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = hidden.reshape(-1, router.weight.shape[1]) @ router.weight.T
            ids = (logits + self.noise[k]).sort(dim=-1, descending=True).indices[:, :CHOSEN]
            self.taken[k] = ids
            share = logits.exp() / logits.exp().sum(-1, keepdim=True)
            taken = torch.stack([share[row, own] for row, own in enumerate(ids)])
            return logits, (taken / taken.sum(-1, keepdim=True)).to(logits.dtype), ids

        return forward

    def answer(self, sample: Sample, seed: int) -> tuple[torch.Tensor, Gradients]:
        """Values [n] and gradients of its weighted sum; the sample gets `routed_experts`, as vLLM has them.

        Noise follows from `seed`, layer and position. Routes of the last token are zeros.
        """
        draw = torch.Generator().manual_seed(seed)
        self.noise = [
            torch.randn(LONGEST, EXPERTS, generator=draw, dtype=torch.float64)[: len(sample)] * 4
            for _ in self.noise
        ]
        bare = copy.copy(sample)
        bare.routed_experts = None
        out = logprobs_and_gradients(self.model, mp.pad([bare]))
        routes = torch.stack(self.taken, dim=1)
        routes[-1] = 0
        sample.routed_experts = mp.schema.compact_routes(routes.numpy(), EXPERTS)
        return out

    def answers(self, samples: list[Sample], seeds: list[int]) -> tuple[torch.Tensor, Gradients]:
        """Of all samples: values [N], and gradients added up."""
        found = [self.answer(s, seed) for s, seed in zip(samples, seeds, strict=True)]
        names = dict.fromkeys(name for _, gradients in found for name in gradients)
        total = {
            name: torch.stack([g[name] for _, g in found if name in g]).sum(0) for name in names
        }
        return torch.cat([values for values, _ in found]), total
