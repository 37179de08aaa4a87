"""Fresh processes: a test that asks what an import loads, or how a command exits, needs one."""

import subprocess
import sys
from pathlib import Path


def run_python(code: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, `args` as its sys.argv[1:]. Streams come back as text."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run_mmpack(*args: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `mmpack args...` as a person would. Streams come back as text."""
    command = [sys.executable, "-m", "mmpack", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
