"""`mmpack probe chain`: models of real or tiny shapes with random weights, drawn samples, and all axes on them.

Read options.py, run.py, prepare.py (with samples.py), then ranks.py. Stages and bounds are in `mmpack.probe.chain`, the
runs of a transformers model in `mmpack.adapters.transformers.chain`.
"""

from mmpack.bench.chain.options import AXES, ONE_PROCESS, RANKS, Options
from mmpack.bench.chain.run import chain

__all__ = ["AXES", "ONE_PROCESS", "RANKS", "Options", "chain"]
