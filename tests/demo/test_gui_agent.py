"""The tutorial of an agent on a page runs unchanged, in a real browser."""

import re
import shutil
from pathlib import Path

import pytest
from support.process import run_tutorial

TUTORIAL = Path(__file__).parents[2] / "examples" / "gui_agent.py"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_tutorial_takes_a_step():
    done, seconds = run_tutorial(TUTORIAL)
    assert done.returncode == 0, done.stderr
    assert seconds < 120
    episodes, step = done.stdout.splitlines()
    count, succeeded, reasoning, action, response = map(int, re.findall(r"\d+", episodes))
    assert 0 < succeeded < count  # so that there is something to learn from
    assert reasoning > 0 and action > 0 and response > 0
    figures = [float(x) for x in re.findall(r"-?\d[\d.]*(?:e[+-]\d+)?", step)]
    rows, tokens, norm, gain = figures
    assert rows < tokens and norm > 0 and gain > 0  # prompts once; good episodes are likelier


def test_the_tutorial_is_short():
    assert len(TUTORIAL.read_text(encoding="utf-8").splitlines()) <= 150
