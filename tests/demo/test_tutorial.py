"""The tutorials run unchanged, and the figures that they print are those of steps that are right."""

import re
import shutil
from pathlib import Path

import pytest
from support.process import run_tutorial

from mmpack.contracts import TOLERANCES

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name):
    done, seconds = run_tutorial(EXAMPLES / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert seconds < 120
    return done.stdout


def numbers(line):
    return [float(x) for x in re.findall(r"-?\d[\d.]*(?:e[+-]\d+)?", line)]


@pytest.mark.slow
def test_geometry_takes_a_step():
    lines = printed("geo3k_grpo").splitlines()
    shown = {line.partition(" ")[0].rstrip(":"): line for line in lines}
    figures = {name: numbers(line) for name, line in shown.items()}
    assert shown["parity"] == "parity ok: 16 samples compared, 0 findings"
    least, most = figures["advantages"]
    assert least < 0 < most
    micro_batches, rows, tokens = figures["plan"]
    assert micro_batches > 1 and rows < tokens / 2  # each prompt is computed once
    off, between = figures["logprobs"]
    assert off <= TOLERANCES["generate"].value and between <= TOLERANCES["layouts"].value
    _, norm, gain = figures["step"]
    assert norm > 0 and gain > 0


@pytest.mark.slow
def test_the_reward_of_boxes_rises():
    out = printed("grounding")
    steps = [float(x) for x in re.findall(r"mean IoU (\d\.\d+)", out)]
    assert len(steps) == 16 and all(0 <= x <= 1 for x in steps)
    first, last = map(float, re.findall(r"(\d\.\d+) in the", out))
    # 48 random boxes a step: a mean moves by about 0.01 from step to step
    assert last > first + 0.15, out
    broken = [int(x) for x in re.findall(r"(\d+) of 48", out)]
    assert sum(broken[-3:]) < sum(broken[:3])


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("chromium") is None and shutil.which("google-chrome") is None,
    reason="needs chromium",
)
def test_an_agent_on_a_page_takes_a_step():
    episodes, step = printed("gui_agent").splitlines()
    count, succeeded, reasoning, action, response = map(int, re.findall(r"\d+", episodes))
    assert 0 < succeeded < count  # so that there is something to learn from
    assert reasoning > 0 and action > 0 and response > 0
    rows, tokens, norm, gain = numbers(step)
    assert rows < tokens and norm > 0 and gain > 0  # prompts once; good episodes are likelier


@pytest.mark.parametrize("name", ["gui_agent", "grounding"])
def test_it_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 150
