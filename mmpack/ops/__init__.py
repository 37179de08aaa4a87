"""Operators on [T] packed rows and [N] loss tokens: one folder per op.

A folder reads in this order: the file with the public function, `torch.py` (plain PyTorch, what all others have to
compute), `triton.py`, `cuda.py` (the binding to csrc/, where there is one), and `__init__.py`, which declares what
there is to choose from; `backend.py` chooses. Attention has a chooser of its own, and its plain version is `sdpa.py`.
"""
