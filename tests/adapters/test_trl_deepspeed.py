"""MmpackGRPO under DeepSpeed's ZeRO, two ranks on the CPU, against stock TRL in one process."""

import pytest
import torch
from support.models import small_model
from support.process import free_port
from support.trl_ranks import RANKS, Ours, assert_one_process, join, save, train

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("stage", [3, 2])
def test_two_ranks_are_one_process(tmp_path, stage):
    checkpoint = tmp_path / "model"
    model = small_model("qwen2_5_vl", factor=2)
    model.save_pretrained(checkpoint)
    torch.multiprocessing.spawn(run, (free_port(), checkpoint, tmp_path, stage), nprocs=RANKS)
    assert_one_process(checkpoint, tmp_path, dict(model.named_parameters()))


def run(rank, port, checkpoint, folder, stage):
    join(rank, port, ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
    import deepspeed
    from accelerate.state import PartialState

    from mmpack.adapters.transformers import encode_once
    from mmpack.adapters.transformers.unwrap import is_engine, is_sharded
    from mmpack.errors import ModelError

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    PartialState(backend="gloo")  # as accelerate finds it on no CPU
    trainer = train(
        Ours,
        checkpoint,
        folder / str(rank),
        2,
        gradient_accumulation_steps=2,
        use_cpu=False,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        accelerator_config={"use_configured_state": True},
    )
    assert (
        is_engine(trainer.model_wrapped)
        and trainer.model_wrapped.zero_optimization_stage() == stage
    )
    assert is_sharded(trainer.model) == is_sharded(trainer.ref_model) == (stage == 3)
    with (
        pytest.raises(ModelError, match="a DeepSpeed engine"),
        encode_once(trainer.model_wrapped, []),
    ):
        pass
    named = dict(trainer.model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        whole = {n: p.detach().clone() for n, p in named.items()}
    if rank == 0:
        save(trainer, folder, whole)
