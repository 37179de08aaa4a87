"""MmpackGRPO under accelerate with FSDP2, two ranks on the CPU, against stock TRL in one process."""

import pytest
import torch
from support.models import small_model
from support.process import free_port
from support.trl_ranks import RANKS, Ours, assert_one_process, join, save, train

pytestmark = pytest.mark.slow


def test_two_ranks_are_one_process(tmp_path):
    checkpoint = tmp_path / "model"
    model = small_model("qwen2_5_vl", factor=2)
    model.save_pretrained(checkpoint)
    torch.multiprocessing.spawn(run, (free_port(), checkpoint, tmp_path), nprocs=RANKS)
    assert_one_process(checkpoint, tmp_path, dict(model.named_parameters()))


def run(rank, port, checkpoint, folder):
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FSDPModule

    join(rank, port)
    state = PartialState(cpu=True, backend="gloo")
    # accelerate shards on accelerators only, and takes these CPUs for such
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = train(
        Ours,
        checkpoint,
        folder / str(rank),
        2,
        gradient_accumulation_steps=2,  # which become one pass
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        accelerator_config={"use_configured_state": True},
    )
    assert trainer._joined == 2
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert isinstance(trainer.model, FSDPModule) and isinstance(trainer.ref_model, FSDPModule)
    whole = {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters()}
    if rank == 0:
        save(trainer, folder, whole)
