"""`make fuzz`: what holds passes, and what a reader must not do is kept as a file, with exit code 1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzz_targets import TARGETS

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "support" / "fuzz.py"
PLANTED = """
import os
from support.fuzz_targets import Target

def files(seed, folder):
    for i in range(1000):
        yield b"%d" % i

def raises(path):
    return 100 // (7 - int(path.read_bytes())) > 0

def dies(path):
    if path.read_bytes() == b"7":
        os.abort()
    return True

raising, dying = Target(".bin", files, raises), Target(".bin", files, dies)
"""


def run(*args, path=""):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(path)])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, args)],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["raising", "dying"])
def test_a_planted_fault_is_kept(tmp_path, name):
    (tmp_path / "planted.py").write_text(PLANTED)
    keep = tmp_path / "kept"
    done = run(f"planted:{name}", "--seconds", 60, "--seed", 3, "--keep", keep, path=tmp_path)
    assert done.returncode == 1 and "seed 3, exit " in done.stdout, done
    (file,) = keep.glob("*.bin")
    assert file.read_bytes() == b"7" and str(file) in done.stdout
    assert name == "dying" or "ZeroDivisionError" in file.with_suffix(".txt").read_text()
    if name == "dying":
        return
    assert run(f"planted:{name}", "--again", file, path=tmp_path).returncode != 0
    file.write_bytes(b"6")
    again = run(f"planted:{name}", "--again", file, path=tmp_path)
    assert (again.returncode, again.stdout) == (0, "read\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_readers_hold_for_some_seconds(tmp_path, name):
    done = run(name, "--seconds", 2, "--seed", 0, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout
    assert "refused" in done.stdout and not [*tmp_path.iterdir()]
