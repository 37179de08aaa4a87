"""`python -m chain`: models of real or tiny shapes with random weights, drawn samples, and all axes on them.

Read options.py, run.py, prepare.py (with samples.py), then ranks.py. Stages and bounds are in `chain`, the
runs of a transformers model in `chain.passes`.
"""

from chain.job.options import AXES, ONE_PROCESS, RANKS, Options
from chain.job.run import chain

__all__ = ["AXES", "ONE_PROCESS", "RANKS", "Options", "chain"]
