"""Advantages of groups: one number per sample, over the whole batch."""

from mmpack.ops.backend import Kernel, Op

GROUP_ADVANTAGES = Op("group_advantages", __name__, (Kernel("cuda"), Kernel("triton")))
