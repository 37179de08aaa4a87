"""Bars of long work: on a terminal, with MMPACK_PROGRESS, and nowhere else."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from support.samples import full_sample

import mmpack as mp
import mmpack.progress as module
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


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
    assert on_a_terminal(LONG, MMPACK_PROGRESS="0") == ("done\n", "")
    short = LONG.replace("DELAY = 0.0", "DELAY = 99.0")
    assert on_a_terminal(short) == ("done\n", "")


def test_without_a_terminal_nothing_is_shown_and_nothing_is_wrapped(capfd):
    items = [1, 2, 3]
    assert tracked(items, "counting") is items
    with progress("counting") as done:
        done(1)
    samples = [full_sample(f"s{i}", seed=i) for i in range(3)]
    assert mp.compare(samples, samples).ok and mp.validate(samples) == []
    assert mp.plan(samples, max_tokens=99).total_samples == 3
    assert len(mp.pack(samples).sample_ids) == 3
    mp.view.html(samples)
    assert capfd.readouterr() == ("", "")


def test_lines_where_they_are_asked_for_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("MMPACK_PROGRESS", "1")
    samples = [full_sample(f"s{i}", seed=i) for i in range(3)]
    ran = {
        "comparing": lambda: mp.compare(samples, samples),
        "validating": lambda: mp.validate(samples),
        "planning": lambda: mp.plan(samples, max_tokens=99),
        "packing": lambda: mp.pack(samples),
        "padding": lambda: mp.pad(samples),
    }
    for what, run in ran.items():
        run()
        first, last = capsys.readouterr().err.splitlines()
        assert first == f"mmpack: {what}: 0 of 3, 0 s"
        assert re.fullmatch(f"mmpack: {what}: 3 of 3, [0-9]+ s", last)
    mp.view.html(samples)
    assert capsys.readouterr().err.splitlines()[-1].startswith("mmpack: drawing: ")


def test_another_thread_and_another_rank_show_nothing(monkeypatch, capsys):
    monkeypatch.setenv("MMPACK_PROGRESS", "1")
    monkeypatch.setenv("RANK", "1")
    list(tracked([1], "counting"))
    monkeypatch.delenv("RANK")
    thread = threading.Thread(target=lambda: list(tracked([1], "counting")))
    thread.start()
    thread.join()
    assert capsys.readouterr().err == ""


def test_without_rich_a_terminal_stays_quiet(monkeypatch):
    find = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "rich" else find(name)
    )
    monkeypatch.setattr(sys, "stderr", Terminal())
    items = [1]
    assert tracked(items, "counting") is items


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
