"""verl's Megatron engine on packs: it replaces the engine's `forward_step`, the model's whole forward with it.

verl's own loop, schedule, loss and optimizer stay; micro-batches are bins of mmpack's plan, as with FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mmpack.adapters.megatron as megatron
from mmpack.adapters.checks import refuse_on
from mmpack.adapters.megatron.modules import unwrap
from mmpack.adapters.verl.engine import EngineHandle, _nested, _temperature
from mmpack.families import Family, family_of_config
from mmpack.packing.pack import pack

UNKNOWN = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


class MegatronHandle(EngineHandle):
    """A verl Megatron engine whose forward is mmpack's."""

    def refuse(self) -> None:
        """Raise ModelError for settings that mmpack's forward can't obey."""
        engine, own = self.owner, self.owner.engine_config
        chunks = len(engine.module) > 1
        options = (
            ("use_fused_kernels", own.use_fused_kernels, "turn it off: mmpack makes no logits"),
            ("dynamic_context_parallel", own.dynamic_context_parallel, "turn it off"),
            (
                "router_replay",
                engine.enable_routing_replay,
                "disable it: mmpack replays recorded routes",
            ),
            ("mtp", engine.model_config.mtp.enable, "turn it off"),
            (
                "virtual pipeline parallelism",
                chunks,
                "leave out virtual_pipeline_model_parallel_size",
            ),
        )
        refuse_on("verl engine", options)
        self.attached = megatron.attach(engine.module)

    def stop(self) -> None:
        super().stop()
        self.attached.detach()

    def asked(self) -> tuple[Family, int]:
        language = unwrap(self.owner.module[0], "verl engine")[1]
        family = family_of_config(self.owner.model_config.hf_config)
        return family, language.config.num_moe_experts or 0

    def shares(self) -> bool:
        return True

    @property
    def sharing_ranks(self) -> int:
        return int(self.owner.engine_config.context_parallel_size)

    def forward_step(  # type: ignore[override]
        self,
        batches: Iterator[Any],
        model: Any,
        logits_processor_func: Callable[..., Any] | None,
        postprocess_micro_batch_func: Callable[..., Any],
    ) -> tuple[Any, Callable[..., Any]]:
        """One stage's forward of a micro-batch, as verl's own `forward_step`: what its schedule takes.

        On the last stage `log_probs` and `entropy`, nested [B, j]; on others hidden states.
        """
        from verl.utils import tensordict_utils as tu
        from verl.utils.device import get_device_id

        def flag(name: str) -> Any:
            return tu.get_non_tensor_data(data=micro_batch, key=name, default=False)

        micro_batch = next(batches)
        samples = self.samples_in(micro_batch)
        refuse_on("verl engine", [(name, flag(name), "leave it out") for name in UNKNOWN])
        micro_batch = micro_batch.to(get_device_id())
        batch = pack(samples, share_prefix=True, pad_to_multiple_of=megatron.pad_multiple(model))
        batch = batch.to(micro_batch["input_ids"].device)
        entropy = bool(flag("calculate_entropy"))
        temperature = _temperature(micro_batch["temperature"])
        out = megatron.packed_logprobs(model, batch, temperature, entropy)
        self.stats.update(batch.stats)
        if unwrap(model, "verl engine")[1].post_process:
            values = out if entropy else (out,)
            named = dict(zip(("log_probs", "entropy"), values, strict=False))
            out = _nested(micro_batch["input_ids"], batch, named)
        return out, partial(postprocess_micro_batch_func, data=micro_batch)
