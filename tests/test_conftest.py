"""What a test sets is put back, also where its teardown fails; `--cases` and `few`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

TWO_TESTS = """
import os


def test_one_whose_teardown_fails(monkeypatch):
    monkeypatch.setenv("MMPACK_ATTENTION", "sdpa")
    monkeypatch.setenv("MMPACK_BACKEND", "triton")
    monkeypatch.setattr(os, "gone", 1, raising=False)
    del os.gone


def test_the_next():
    assert "MMPACK_ATTENTION" not in os.environ and os.environ["MMPACK_BACKEND"] == "torch"
"""


def test_settings_are_put_back_where_a_teardown_fails(tmp_path):
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(TESTS), "MMPACK_BACKEND": "torch"}
    done = subprocess.run(
        [*command, str(tmp_path)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr


MANY_CASES = """
import pytest


@pytest.mark.parametrize("k", [*range(9), pytest.param(9, marks=pytest.mark.slow)])
def test_many(k):
    pass


@pytest.mark.few(2)
@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)])
@pytest.mark.parametrize("c", "xy")
def test_of_two_parameters(a, b, c):
    pass
"""


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (["-m", "not slow and not rest", "--cases", "3"], "5 passed, 15 deselected"),
        (["-m", "slow or rest"], "9 passed, 11 deselected"),
    ],
)
def test_some_cases_of_each_test_are_drawn(options, counts, tmp_path):
    (tmp_path / "test_many.py").write_text(MANY_CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert counts in done.stdout, done.stdout + done.stderr
