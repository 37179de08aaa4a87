"""For a configuration of verl: `actor_rollout_ref.model.external_lib=mmpack.adapters.verl.enable`, and nothing more.

Importing this module registers mmpack's engines with verl, under a vendor of its own, and selects that vendor (verl's
VERL_ENGINE_VENDOR). verl imports external_lib before it makes an engine; critics and other backends stay verl's. In the
trainer's process, which imports it too, the rows of a prompt go to one rank: see groups.py.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from mmpack.adapters.verl.engine import EngineHandle, use
from mmpack.adapters.verl.groups import keep_groups
from mmpack.adapters.verl.micro_batches import calling
from mmpack.errors import ModelError

VENDOR = "mmpack"
VARIABLE = "VERL_ENGINE_VENDOR"
DEVICES = ["cuda", "npu", "cpu"]
# models that keep transformers' forward: verl's takes the tower's output for a tensor, as before transformers 5
OWN_FORWARD = ("glm4v",)

if os.environ.get(VARIABLE, VENDOR) != VENDOR:
    raise ModelError(
        f"mmpack.adapters.verl.enable: {VARIABLE} is {os.environ[VARIABLE]!r}. Fix: unset it, or drop external_lib"
    )
os.environ[VARIABLE] = VENDOR
keep_groups()


class Packing:
    """An engine of verl whose forward goes through mmpack."""

    handle: EngineHandle

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.model_config.use_fused_kernels:  # type: ignore[attr-defined]
            logging.getLogger("mmpack").warning(
                "verl engine: use_fused_kernels is off, mmpack makes the logits of loss tokens only"
            )

    def initialize(self) -> None:
        if hasattr(self, "handle"):  # verl resets an engine by initializing it again
            self.handle.stop()
        super().initialize()  # type: ignore[misc]
        self.handle = use(self)


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=DEVICES, vendor=VENDOR)
class MmpackEngine(Packing, FSDPEngineWithLMHead):
    """verl's FSDP engine. Its model keeps transformers' attention and head: packing and Ulysses are mmpack's."""

    def _build_module(self) -> Any:
        return calling(FSDPEngine._build_module, apply_monkey_patch=_patch)(self)


def _patch(model: Any, **_: Any) -> None:
    """verl's `apply_monkey_patch`, without what would bypass mmpack."""
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    if model.config.model_type not in OWN_FORWARD:
        apply_monkey_patch(model=model, use_remove_padding=False)


if "megatron" in EngineRegistry._engines["language_model"]:  # it is installed
    from verl.workers.engine import MegatronEngineWithLMHead

    @EngineRegistry.register("language_model", "megatron", device=DEVICES, vendor=VENDOR)
    class MmpackMegatron(Packing, MegatronEngineWithLMHead):
        """verl's Megatron engine, whose layers and schedule stay as verl's bridge builds them."""


if "veomni" in EngineRegistry._engines["language_model"]:  # it is installed
    from veomni.distributed import parallel_state
    from verl.workers.engine.veomni import VeOmniEngineWithLMHead

    @EngineRegistry.register("language_model", "veomni", device=DEVICES, vendor=VENDOR)
    class MmpackVeOmni(Packing, VeOmniEngineWithLMHead):
        """verl's VeOmni engine. Within a pass its model has all rows until mmpack cuts them: Ulysses is mmpack's."""

        def initialize(self) -> None:
            if self.enable_routing_replay:
                raise ModelError(
                    "verl engine: router_replay of VeOmni is on, which the packed pass does not support. "
                    "Fix: set actor.veomni.router_replay.mode=disabled"
                )
            # its layers require this argument; mmpack's attention does not read it
            self.asked = {"cu_seq_lens_q": torch.zeros(1, dtype=torch.int32)}
            super().initialize()

        def get_data_parallel_size(self) -> int:
            size = torch.distributed.get_world_size()
            return size // int(self.ulysses_sequence_parallel_size)

        def get_data_parallel_group(self) -> Any:
            return parallel_state.get_parallel_state().device_mesh.get_group("dp")

        @contextmanager
        def own_rows(self) -> Iterator[None]:
            alone = copy.copy(parallel_state.get_parallel_state())
            object.__setattr__(alone, "ulysses_size", 1)  # it is frozen
            with parallel_state.use_parallel_state(alone):
                yield
