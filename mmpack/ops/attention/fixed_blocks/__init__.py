"""Attention whose bits do not depend on what a sequence is packed with.

Queries and keys are cut into blocks that count from the start of their own path: a row stands at one place of one
block, and sees the blocks of its keys in one order, alone, packed, padded, or behind a shared prefix. No sum is split,
none is made by atomics. Read attend.py (the op), torch.py, triton.py and kernels.py.
"""

from mmpack.ops.backend import Op

_FLOATS = ("bfloat16", "float16", "float32")
FIXED_BLOCKS = Op("fixed_blocks", __name__, only=_FLOATS, why="the kernel can't take {dtype}")
