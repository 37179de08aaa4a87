"""Files are whole or as they were: links, modes, killed writers, full disks."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.samples import full_sample

from mmpack.errors import TraceError
from mmpack.files import read_bounded, write_text
from mmpack.schema.trace import FORMATS, read_trace, write_trace

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
# writes a first record, says so, and then waits until it is killed or its input ends
WRITER = """
import sys
from support.samples import full_sample
from mmpack.schema.trace import write_trace

def slow():
    yield full_sample("s0")
    print("writing", flush=True)
    sys.stdin.read()

write_trace(sys.argv[1], slow())
"""


def writer(path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    path = tmp_path / "t.jsonl"
    killed, living = writer(path), writer(path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (tmp_path / ".t.jsonl.mine.tmp").touch()  # of no writer
    (tmp_path / f".other.jsonl.{'0' * 16}.tmp").touch()  # of another file's
    assert len(list(tmp_path.iterdir())) == 4
    write_trace(path, [full_sample("s1")])
    assert len(list(tmp_path.iterdir())) == 4  # one left over gone, the trace there
    assert living.communicate()[0] == "" and living.returncode == 0
    assert [s.sample_id for s in read_trace(path)] == ["s0"]
    assert len(list(tmp_path.iterdir())) == 3


def test_the_link_stays_and_the_mode_too(tmp_path):
    for suffix in FORMATS:
        path, link = tmp_path / f"real{suffix}", tmp_path / f"link{suffix}"
        write_trace(path, [full_sample()])
        path.chmod(0o640)
        link.symlink_to(path.name)
        assert write_trace(link, [full_sample("a"), full_sample("b")]) == 2
        assert link.is_symlink() and len(list(read_trace(path))) == 2
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling.jsonl"
    dangling.symlink_to("later.jsonl")
    write_trace(dangling, [full_sample()])
    assert dangling.is_symlink() and (tmp_path / "later.jsonl").is_file()
    mask = os.umask(0o027)
    try:
        write_trace(tmp_path / "new.jsonl", [])
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new.jsonl").stat().st_mode) == 0o640


FULL = """
import resource, sys
from support.samples import full_sample
from mmpack.errors import TraceError
from mmpack.schema.trace import write_trace
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write_trace(sys.argv[1], (full_sample(f"s{i}", i) for i in range(300)))
except TraceError as error:
    print(error)
"""


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    write_trace(path, [full_sample()])
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"write_trace: {path} can't be written (File too large). Fix: ")
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "no folder", "file as folder"])
def test_what_can_not_be_written_to(tmp_path, kind):
    path = tmp_path / "t.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to("u.jsonl")
        (tmp_path / "u.jsonl").symlink_to("t.jsonl")
    elif kind == "no folder":
        path = tmp_path / "no" / "t.jsonl"
    else:
        (tmp_path / "f").touch()
        path = tmp_path / "f" / "t.jsonl"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TraceError, match=r"^write_trace: .*Fix: name a ") as caught:
        write_trace(path, [full_sample()])
    assert "\n" not in str(caught.value) and sorted(tmp_path.iterdir()) == before


def test_a_long_name_and_texts_of_commands(tmp_path):
    path = tmp_path / ("é" * 120 + ".json")
    write_text(path, "one\n")
    path.chmod(0o600)
    write_text(path, "two \ud800\n")
    assert path.read_text() == "two \\ud800\n" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [path]


def test_read_bounded(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10)
    assert read_bounded(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="10 bytes, more than 9"):
        read_bounded(path, 9)
