"""Frames to patches [rows, patch_dim] and back, by one table of places; bytes of patches to floats."""

from mmpack.ops.backend import Op

PACK_VIDEO = Op("pack_video", __name__)
UNPACK_VIDEO = Op("unpack_video", __name__)
NORMALIZE_BYTES = Op("normalize_bytes", __name__)
