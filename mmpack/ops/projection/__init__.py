"""The projector's last product, written into the embeddings of text at the vision rows, all deepstack levels.

Read project.py (the public function and its op), torch.py (the plain version), then triton.py.
"""

from mmpack.ops.backend import Op

_HALVES = ("bfloat16", "float16")
_WHY = "its kernels take bf16 and fp16, not {dtype}"
PROJECT_AND_MERGE = Op("project_and_merge", __name__, only=_HALVES, why=_WHY)
