"""verl on a CPU: a platform of its plugin registry, one process, and an FSDP engine around a tiny model."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def start() -> None:
    """Once per process, before anything else asks verl for its platform."""
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

        def empty_cache(self) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

    PlatformRegistry.register("cpu")(Cpu)
    from torch.distributed.fsdp import _common_utils, _init_utils, fully_sharded_data_parallel
    from verl.workers.engine.fsdp import transformer_impl

    def on_cpu(state: Any, *_: Any) -> Any:
        state._device_handle = _common_utils._FSDPDeviceHandle(torch.device("cpu"), torch.cpu)
        return state

    _init_utils._init_device_handle = on_cpu
    fully_sharded_data_parallel._init_device_handle = on_cpu

    class CpuFSDP(transformer_impl.FSDP):
        """FSDP 1 broadcasts weights on GPUs only; each rank has read the same."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"sync_module_states": False, "device_id": None})

    transformer_impl.FSDP = CpuFSDP
    if torch.distributed.is_initialized():  # by a test of several ranks
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")


def make_engine(
    checkpoint: Path, strategy: str = "fsdp2", ulysses: int = 1, **model_options: Any
) -> Any:
    """verl's engine for a language model under FSDP, in fp32, as its registry makes it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    options = {
        "path": str(checkpoint),
        "load_tokenizer": False,
        "use_remove_padding": False,
        "override_config": {"attn_implementation": "sdpa"},
    }
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(**(options | model_options)),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
            use_torch_compile=False,
            use_dynamic_bsz=False,
            ulysses_sequence_parallel_size=ulysses,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_veomni_engine(checkpoint: Path, ulysses: int = 1, **model_options: Any) -> Any:
    """verl's engine around VeOmni's model, without kernels, in fp32; one topology of ranks at a time."""
    from dataclasses import fields

    from veomni.distributed import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, VeOmniEngineConfig, VeOmniOptimizerConfig
    from verl.workers.engine import EngineRegistry

    parallel_state._PARALLEL_STATE = None
    parallel_state._PARALLEL_STATE_CACHE.clear()
    parallel_state._PARALLEL_STATE_REGISTRY.clear()
    names = [f.name for f in fields(VeOmniEngineConfig) if f.name.endswith("_implementation")]
    kernels = dict.fromkeys(names, "eager")
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="veomni",
        model_config=HFModelConfig(path=str(checkpoint), load_tokenizer=False, **model_options),
        engine_config=VeOmniEngineConfig(
            **kernels | {"attn_implementation": "sdpa", "qat_implementation": "none"},
            ulysses_parallel_size=ulysses,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            mixed_precision=False,
            strategy="veomni",
        ),
        optimizer_config=VeOmniOptimizerConfig(lr=1e-3, total_training_steps=2),
        checkpoint_config=CheckpointConfig(),
    )
    engine._autocast_dtype = torch.float32
    engine.initialize()
    engine.module.float()  # VeOmni loads bfloat16
    return engine
