"""OpenRLHF's DeepSpeed strategy, whose actors compute through mmpack: policy, reference and moving average.

`prepare` is where its workers hand it their models, so nothing of OpenRLHF's is replaced. Critics and reward models are
no Actor, and stay as they are.
"""

from __future__ import annotations

from typing import Any

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.openrlhf.actor import use
from mmpack.errors import needs

with needs("openrlhf", __name__):
    from openrlhf.models import Actor
    from openrlhf.utils.deepspeed import DeepspeedStrategy


class MmpackStrategy(DeepspeedStrategy):
    """`DeepspeedStrategy`, which lets mmpack compute for each Actor that it prepares; takes the same arguments.

    Raises, when built: ModelError for what mmpack's passes can't obey: ring attention, tensor parallel, DeepCompile,
    the router's auxiliary loss.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)

    def prepare(self, *args: Any) -> Any:
        """OpenRLHF's. Raises: as `mmpack.adapters.openrlhf.use`."""
        out = super().prepare(*args)
        for given in args:
            model = given[0] if isinstance(given, tuple) else given
            if isinstance(model, Actor):
                use(model)
        return out


def refuse_unsupported(strategy: Any) -> None:
    """Raise ModelError for options of a strategy that the packed pass can't obey."""
    actor = getattr(strategy.args, "actor", None)
    auxiliary = getattr(actor, "aux_loss_coef", 0) > 1e-8
    options = (
        ("ring attention", strategy.ring_attn_size > 1, "--ds.ring_attn_size 1"),
        ("tensor parallel", strategy.ds_tensor_parallel_size > 1, "--ds.tensor_parallel_size 1"),
        ("DeepCompile", strategy.deepcompile, "drop --ds.deepcompile"),
        ("the router's auxiliary loss", auxiliary, "--actor.aux_loss_coef 0"),
    )
    refuse_on("MmpackStrategy", options)


def get_strategy(args: Any) -> MmpackStrategy:
    """As `openrlhf.utils.get_strategy`, of the options of `openrlhf.cli.train_ppo_ray`."""
    return MmpackStrategy(
        seed=getattr(args.train, "seed", 42),
        full_determinism=getattr(args.train, "full_determinism_enable", False),
        max_norm=getattr(args, "max_norm", 1.0),
        micro_train_batch_size=getattr(args.train, "micro_batch_size", 1),
        train_batch_size=getattr(args.train, "batch_size", 128),
        zero_stage=args.ds.zero_stage,
        args=args,
    )
