"""The tutorial runs unchanged, and the figures that it prints are those of a step that is right."""

import re
import subprocess
import sys
from pathlib import Path

from mmpack.contracts import TOLERANCES

TUTORIAL = Path(__file__).parents[2] / "examples" / "geo3k_grpo.py"


def test_the_tutorial_takes_a_step():
    done = subprocess.run([sys.executable, TUTORIAL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = {line.partition(" ")[0].rstrip(":"): line for line in done.stdout.splitlines()}
    figures = {
        name: [float(x) for x in re.findall(r"-?\d[\d.]*(?:e[+-]\d+)?", line)]
        for name, line in shown.items()
    }
    assert shown["parity"] == "parity ok: 16 samples compared, 0 findings"
    least, most = figures["advantages"]
    assert least < 0 < most
    micro_batches, rows, tokens = figures["plan"]
    assert micro_batches > 1 and rows < tokens / 2  # each prompt is computed once
    off, between = figures["logprobs"]
    assert off <= TOLERANCES["generate"].value and between <= TOLERANCES["layouts"].value
    _, norm, gain = figures["step"]
    assert norm > 0 and gain > 0
