"""The tutorial on boxes runs unchanged and its reward rises."""

import re
from pathlib import Path

import pytest
from support.process import run_tutorial

TUTORIAL = Path(__file__).parents[2] / "examples" / "grounding.py"


@pytest.mark.slow
def test_the_reward_rises():
    done, seconds = run_tutorial(TUTORIAL)
    assert done.returncode == 0, done.stderr
    assert seconds < 120
    steps = [float(x) for x in re.findall(r"mean IoU (\d\.\d+)", done.stdout)]
    assert len(steps) == 16 and all(0 <= x <= 1 for x in steps)
    first, last = map(float, re.findall(r"(\d\.\d+) in the", done.stdout))
    # 48 random boxes a step: a mean moves by about 0.01 from step to step
    assert last > first + 0.15, done.stdout
    broken = [int(x) for x in re.findall(r"(\d+) of 48", done.stdout)]
    assert sum(broken[-3:]) < sum(broken[:3])


def test_it_is_short():
    assert len(TUTORIAL.read_text(encoding="utf-8").splitlines()) <= 150
