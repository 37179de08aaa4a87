"""Samples to packed and padded batches of torch tensors, and back."""

from mmpack.errors import require

require("torch", "torch", __name__)
