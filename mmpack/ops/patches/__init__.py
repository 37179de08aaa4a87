"""Frames to patches [rows, patch_dim] and back, by one table of places; bytes of patches to floats."""

from mmpack.ops.backend import Kernel, Op

_KERNELS = (
    Kernel("cuda", only=("uint8",), why="csrc/ packs bytes, not {dtype}"),
    Kernel("triton"),
)
PACK_VIDEO = Op("pack_video", __name__, _KERNELS)
UNPACK_VIDEO = Op("unpack_video", __name__, _KERNELS)
NORMALIZE_BYTES = Op("normalize_bytes", __name__, (Kernel("triton"),))
