"""Operators on [T] packed rows and [N] loss tokens: one folder per op.

A folder reads in this order: the file with the public function, `torch.py` (plain PyTorch, what the kernels have to
compute), `triton.py`, and `__init__.py`, which declares the op; `backend.py` chooses. Attention has a chooser of its
own, and its plain version is `sdpa.py`.
"""
