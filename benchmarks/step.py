"""Whole training steps beside peers: `python benchmarks/step.py [--model M] [--workload W] [--peer P] …`.

It is `mmpack bench step`, and adds to benchmarks/results/step.json. A process that is stopped goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mmpack.cli.main import main

OUT = Path(__file__).parent / "results" / "step.json"

if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(["bench", "step", *(given if "--out" in given else ["--out", str(OUT), *given])]))
