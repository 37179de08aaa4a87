"""Commands, in this process or in a fresh one: a test that asks what an import loads needs a fresh one."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from mmpack.cli.main import main


def call_mmpack(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """What `run_mmpack` returns, without the second that a process takes to start."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(arg) for arg in args])
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def run_python(code: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, `args` as its sys.argv[1:]. Streams come back as text."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run_mmpack(*args: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `mmpack args...` as a person would. Streams come back as text."""
    command = [sys.executable, "-m", "mmpack", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
