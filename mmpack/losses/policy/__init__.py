"""The policy loss: its function, options, plain torch version and kernels."""

from mmpack.ops.backend import Op

POLICY_LOSS = Op("policy_loss", __name__)
