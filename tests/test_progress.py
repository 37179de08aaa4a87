"""Bars of long work: on a terminal, with MMPACK_PROGRESS, and nowhere else."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from support.samples import full_sample

import mmpack as mp
from mmpack.progress import progress, tracked

LONG = """
import time
import mmpack.progress as module
module.DELAY = 0.0
for _ in module.tracked(range(30), "counting"):
    for _ in module.tracked(range(3), "within"):
        time.sleep(0.01)
print("done")
"""


@pytest.fixture(autouse=True)
def of_nobody(monkeypatch):
    monkeypatch.delenv("MMPACK_PROGRESS", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def on_a_terminal(code, **settings):
    """stdout, and what a terminal shows of stderr."""
    leader, follower = pty.openpty()
    shown = []

    def read():  # all along: a terminal holds little, and who writes waits for it
        with contextlib.suppress(OSError):  # its other end was closed
            while piece := os.read(leader, 1 << 16):
                shown.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", **settings},
        check=True,
        text=True,
        timeout=60,
    )
    os.close(follower)
    reader.join(timeout=10)
    os.close(leader)
    return result.stdout, b"".join(shown).decode()


def test_a_terminal_shows_the_outermost_bar_and_stdout_is_left_alone():
    out, shown = on_a_terminal(LONG)
    assert out == "done\n"
    assert "counting" in shown and "within" not in shown
    assert re.search(r"\d+/30", shown)
    for code, settings in (
        (LONG, {"MMPACK_PROGRESS": "0"}),
        (LONG.replace("DELAY = 0.0", "DELAY = 99.0"), {}),
    ):
        assert on_a_terminal(code, **settings) == ("done\n", "")


def test_lines_where_they_are_asked_for_without_a_terminal(monkeypatch, capsys):
    samples = [full_sample(f"s{i}", seed=i) for i in range(3)]
    ran = {
        "comparing": lambda: mp.compare(samples, samples),
        "validating": lambda: mp.validate(samples),
        "planning": lambda: mp.plan(samples, max_tokens=99),
        "packing": lambda: mp.pack(samples),
        "padding": lambda: mp.pad(samples),
        "drawing": lambda: mp.view.html(samples),
    }
    assert tracked(samples, "counting") is samples
    for run in ran.values():
        run()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("MMPACK_PROGRESS", "1")
    for what, run in ran.items():
        run()
        first, *_, last = capsys.readouterr().err.splitlines()
        assert what == "drawing" or first == f"mmpack: {what}: 0 of 3, 0 s"
        assert re.fullmatch(f"mmpack: {what}: [0-9]+ of [0-9]+, [0-9]+ s", last)


def test_another_thread_and_another_rank_show_nothing(monkeypatch, capsys):
    monkeypatch.setenv("MMPACK_PROGRESS", "1")
    monkeypatch.setenv("RANK", "1")
    list(tracked([1], "counting"))
    monkeypatch.delenv("RANK")
    thread = threading.Thread(target=lambda: list(tracked([1], "counting")))
    thread.start()
    thread.join()
    assert capsys.readouterr().err == ""


def test_work_that_fails_lets_the_next_bar_show(monkeypatch, capsys):
    monkeypatch.setenv("MMPACK_PROGRESS", "1")
    with pytest.raises(ZeroDivisionError), progress("first"):
        _ = 1 / 0
    assert list(tracked([1], "second")) == [1]
    assert "second: 1 of 1" in capsys.readouterr().err


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("MMPACK_PROGRESS", "yes")
    with pytest.raises(
        mp.ArgumentError, match=r"MMPACK_PROGRESS is 'yes'\. Fix: set it to 0 for no bars"
    ):
        tracked([], "counting")
