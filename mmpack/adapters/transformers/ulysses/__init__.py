"""Sequence parallelism as DeepSpeed-Ulysses has it: ranks share rows, and exchange heads for rows around attention.

Source: Jacobs et al. 2023, arXiv 2309.14509. `split` says which rows are whose and sends them, the rest calls it.
"""
