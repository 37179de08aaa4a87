"""mmpack's ops as a kernel: rows of packed batches, logprobs without logits, RMSNorm, the policy loss."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (who loads a kernel is asked nothing by pip)
    raise ImportError("mmpack: this kernel needs Python 3.11 or newer. Fix: run it under one")

from mmpack.losses.advantages.group import group_advantages
from mmpack.losses.policy.loss import policy_loss
from mmpack.ops.embeddings.merge import merge_embeddings
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.rows.gather import gather_rows

from . import layers

__all__ = [
    "gather_rows",
    "group_advantages",
    "layers",
    "linear_selected_logprobs",
    "merge_embeddings",
    "policy_loss",
    "rms_norm",
    "selected_logprobs",
]
