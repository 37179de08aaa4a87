"""Samples to packed and padded batches of torch tensors, and back; batches for a DataLoader."""

from mmpack.errors import require

require("torch", "torch", __name__)
