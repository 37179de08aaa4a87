"""For a configuration of verl: `actor_rollout_ref.model.external_lib=mmpack.adapters.verl.enable`, and nothing more.

Importing this module registers mmpack's engine with verl, under a vendor of its own, and selects that vendor (verl's
VERL_ENGINE_VENDOR). verl imports external_lib before it makes an engine; critics and other backends stay verl's.
"""

from __future__ import annotations

import os
from typing import Any

from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from mmpack.adapters.verl.engine import EngineHandle, use
from mmpack.errors import ModelError

VENDOR = "mmpack"
VARIABLE = "VERL_ENGINE_VENDOR"

if os.environ.get(VARIABLE, VENDOR) != VENDOR:
    raise ModelError(
        f"mmpack.adapters.verl.enable: {VARIABLE} is {os.environ[VARIABLE]!r}. Fix: unset it, or drop external_lib"
    )
os.environ[VARIABLE] = VENDOR


@EngineRegistry.register(
    "language_model", ["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR
)
class MmpackEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, whose forward goes through mmpack."""

    handle: EngineHandle

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.use_remove_padding = False  # or verl replaces the attention; packing is mmpack's

    def initialize(self) -> None:
        if hasattr(self, "handle"):  # verl resets an engine by initializing it again
            self.handle.stop()
        super().initialize()
        self.handle = use(self)
