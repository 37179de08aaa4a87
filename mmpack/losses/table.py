"""The ops of this room, in the order in which `mmpack doctor` lists them."""

from mmpack.losses.advantages import GROUP_ADVANTAGES
from mmpack.losses.distillation import TEACHER_DIVERGENCE
from mmpack.losses.policy import POLICY_LOSS
from mmpack.losses.returns import SEGMENT_RETURNS
from mmpack.losses.rewards import SCATTER_REWARDS, SCATTER_SCORES
from mmpack.ops.backend import Op

OPS: tuple[Op, ...] = (
    POLICY_LOSS,
    TEACHER_DIVERGENCE,
    GROUP_ADVANTAGES,
    SCATTER_REWARDS,
    SCATTER_SCORES,
    SEGMENT_RETURNS,
)
