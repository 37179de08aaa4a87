"""`--custom-megatron-init-path mmpack.adapters.vime.enable`: their actor computes with mmpack from then on.

Their Megatron backend calls it once in every worker, before the model is built. It puts two functions of this package
in the places of theirs: `get_log_probs_and_entropy` (old, reference, teacher and training passes) and
`policy_loss_function`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mmpack.adapters.handle import Replaced
from mmpack.adapters.vime.megatron import backends
from mmpack.adapters.vime.objective import loss
from mmpack.adapters.vime.responses import log_probs_and_entropy
from mmpack.errors import ModelError

REPLACED = {"get_log_probs_and_entropy": log_probs_and_entropy, "policy_loss_function": loss}
PROVIDER = "mmpack.adapters.vime.linear_logp.provider"


def enable(args: Any) -> Replaced:
    """Let vime's or slime's Megatron backend, whichever is imported, compute logprobs and policy loss through mmpack.

    Args: `args`: their options.
    Raises: ModelError where neither is imported, where mmpack computes already, and for options that would bypass it:
    a provider of somebody else, `qkv_format` bshd.

    The rest stays theirs: rollout, advantages, the value loss, reduction over ranks, and replayed routes, which their
    router reads in the same forward.
    """
    modules = backends()
    if not modules:
        raise ModelError(
            "vime: neither vime's nor slime's Megatron backend is imported. "
            "Fix: name enable in --custom-megatron-init-path, and they call it"
        )
    if any(module.policy_loss_function is loss for module in modules):
        raise ModelError(
            "vime: mmpack is enabled already. Fix: keep the first use, or call its stop() before"
        )
    other = getattr(args, "linear_logp_provider", None)
    if other and other != PROVIDER:
        raise ModelError(
            f"vime: linear_logp_provider is {other!r}, which mmpack would bypass. Fix: drop one of the two flags"
        )
    if getattr(args, "qkv_format", "thd") != "thd":
        raise ModelError(
            f"vime: qkv_format is {args.qkv_format!r}, whose samples are padded. Fix: set --qkv-format thd"
        )
    enabled = Replaced()
    for module in modules:
        root = module.__name__.split(".")[0]
        for name, ours in REPLACED.items():
            theirs = getattr(module, name)
            for user in _users(root, name, theirs):
                enabled.put(user, name, ours)
    return enabled


def _users(root: str, name: str, function: Any) -> list[ModuleType]:
    """Modules of the framework that hold the function by its name."""
    own = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == root and m is not None]
    return [module for module in own if vars(module).get(name) is function]
