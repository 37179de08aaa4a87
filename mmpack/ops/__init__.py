"""Operators on [T] packed rows and [N] loss tokens: one folder per op.

A folder reads in this order: the file with the public function, `torch.py` (plain PyTorch, what the kernels have to
compute), `triton.py`, and `__init__.py`, which declares the op: `table.py` finds it there; `backend.py` chooses.
Attention has a chooser of its own, and its plain version is `sdpa.py`. A small op may be all in `__init__.py` but those
two (there, `torch` is the folder's own: import names from torch); its tests are a row of `tests/ops/test_every_op.py`
and one of `test_offline_compile.py`.
"""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
