"""Losses from teachers: divergences over the ids that a teacher scored, and rewards of sampled tokens.

Read divergence.py (one number per loss token), loss.py (the loss of a batch), sampled.py (the sampled token alone);
call.py (the records), torch.py (the plain version), triton.py.
"""

from mmpack.ops.backend import Op

TEACHER_DIVERGENCE = Op("teacher_divergence", __name__)
