"""vime's and slime's Megatron layers on shared packs: each prompt once for its responses in a micro-batch.

--custom-megatron-before-log-prob-hook-path mmpack.adapters.vime.sharing.share
--custom-megatron-before-train-step-hook-path mmpack.adapters.vime.sharing.share
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mmpack.adapters.checks import refuse_on
from mmpack.families import family_of_config

REPLAYS = ("use_routing_replay", "use_rollout_routing_replay")


def share(args: Any, *given: Any) -> None:
    """Let the chunks of their model, among what their hook is given, share prefixes from now on.

    Raises: as `mmpack.adapters.megatron.attach_thd`; LayoutError (MM006) for a checkpoint of an unknown family;
    ModelError for their replay of routes, which counts rows that are not shared.
    """
    from transformers import AutoConfig

    from mmpack.adapters.megatron import attach_thd

    refuse_on("vime", [(name, getattr(args, name, False), "turn it off") for name in REPLAYS])
    chunks = next(x for x in given if isinstance(x, list | tuple) and isinstance(x[0], nn.Module))
    family = family_of_config(AutoConfig.from_pretrained(args.hf_checkpoint))
    attach_thd(list(chunks), family.name)
