"""What a model's first packed step would import, imported by `attach`: Triton, our kernels, FlashAttention-4."""

from __future__ import annotations

import contextlib

import torch

from mmpack.errors import BackendError
from mmpack.ops import first_use
from mmpack.ops.attention import SEQUENCES, TREE
from mmpack.ops.backend import implementation
from mmpack.ops.embeddings import MERGE_EMBEDDINGS
from mmpack.ops.logprobs.linear import LINEAR_SELECTED_LOGPROBS
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.rows import GATHER_ROWS

OPS = (MERGE_EMBEDDINGS, GATHER_ROWS, LINEAR_SELECTED_LOGPROBS, SUPPORT_LOGPROBS)


def load_kernels(device: torch.device) -> None:
    """Import what runs on `device`; what MMPACK_BACKEND and its like name wrongly is refused where it would run."""
    if device.type != "cuda":
        return
    for op in OPS:
        with contextlib.suppress(BackendError):
            implementation(op, device)
    for chooser in (TREE, SEQUENCES):
        with contextlib.suppress(BackendError):
            takes = chooser.wanted() in ("auto", "flash_attn_4", "flex_flash")
            if takes and chooser.explain(device)["flash_attn_4"] is None:
                first_use.flash_attn_4_interface()
