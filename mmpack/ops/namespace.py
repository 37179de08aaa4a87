"""The namespace of mmpack's ops in torch, `torch.ops.mmpack`. A kernel made by `hub/write.py` has one of its own."""

NAMESPACE = "mmpack"
