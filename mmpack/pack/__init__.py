"""Samples to packed and padded batches of torch tensors, and back."""
