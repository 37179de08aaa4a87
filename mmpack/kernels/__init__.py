"""Triton kernels, under the file names of the ops that launch them. Imported by the ops, when they run."""
