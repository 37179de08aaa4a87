"""The examples of loops run as they are; stock and packed runs have the same losses and weights."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {"trainer_policy": "accelerate", "accelerate_policy": "accelerate"}
NEEDED |= {"lightning_policy": "lightning"}
ELSEWHERE = {"lightning_policy": pytest.mark.logging}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=ELSEWHERE.get(n, ())) for n in NEEDED])
def test_a_loop_takes_the_stock_loop_s_steps(name):
    if find_spec(NEEDED[name]) is None:
        pytest.skip(f"{NEEDED[name]} is not installed")
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^step \d: loss (\S+) (\S+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 2
    for stock, packed in losses:
        assert float(packed) == pytest.approx(float(stock), abs=1e-5)
    assert losses[0] != losses[1]
    [(apart, moved)] = re.findall(r"^weights: apart (\S+), moved (\S+)$", done.stdout, re.MULTILINE)
    assert float(apart) <= 1e-5 * float(moved) + 1e-8 and float(moved) > 1e-3
