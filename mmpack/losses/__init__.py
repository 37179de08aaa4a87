"""Policy and value losses, advantages, GAE and rewards, over loss tokens [N] cut into samples by `cu_loss` [B+1]."""

from mmpack.errors import require

require("torch", "torch", __name__)
