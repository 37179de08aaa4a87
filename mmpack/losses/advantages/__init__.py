"""Advantages of groups: one number per sample, over the whole batch."""

from mmpack.ops.backend import Op

GROUP_ADVANTAGES = Op("group_advantages", __name__)
