"""Commands, in this process or in a fresh one: a test that asks what an import loads needs a fresh one."""

import io
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from mmpack.cli.main import main


def call_mmpack(
    *args: str | Path, main: Callable[[list[str]], int] = main
) -> subprocess.CompletedProcess[str]:
    """What `run_mmpack` returns, without the second that a process takes to start. `main`: of another program."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(arg) for arg in args])
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def refused(*args: str | Path, parts: Sequence[str] = (), code: int = 2) -> str:
    """Call a command that must end in one line on stderr with these parts and a fix; the line."""
    return fails(call_mmpack(*args), *parts, code=code).stderr


def fails(result: Any, *parts: str, code: int = 2) -> Any:
    """The result of a command, which ended in one line on stderr with these parts and a fix."""
    assert (result.returncode, result.stdout) == (code, ""), result
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("mmpack: "), result.stderr
    assert all(part in result.stderr for part in (*parts, "Fix: ")), (parts, result.stderr)
    return result


def run_python(code: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, `args` as its sys.argv[1:]. Streams come back as text."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run_mmpack(*args: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `mmpack args...` as a person would. Streams come back as text."""
    command = [sys.executable, "-m", "mmpack", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run_tutorial(file: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a script of examples/ as a person would; with it the seconds of a core that it took, its children's too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
