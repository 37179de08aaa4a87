"""Keys, pixels and processes for the tests of stores of pixels."""

import hashlib
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
# opens the store that is piped in, does what the code says, and lives until it is killed or its input ends
USER = """
import pickle, sys
from support.blobs import key, pixels

store = pickle.load(sys.stdin.buffer)
{code}
print("ready", flush=True)
sys.stdin.buffer.read()
"""


def key(i: int) -> str:
    return hashlib.sha256(f"medium {i}".encode()).hexdigest()


def pixels(i: int, rows: int = 4) -> np.ndarray:
    """float32 [rows, 64], other values for each i."""
    return np.random.default_rng(i).random((rows, 64), np.float32)


@contextmanager
def process(code: str, given: bytes = b"", program: str = USER):
    """A process that has run `code` with `store`, which is the pickled `given`. Killed at the end."""
    started = subprocess.Popen(
        [sys.executable, "-c", program.format(code=code)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdin is not None and started.stdout is not None
    try:
        started.stdin.write(given)
        started.stdin.flush()
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdin.close()
        started.stdout.close()


def ready(started: subprocess.Popen) -> None:
    line = started.stdout.readline()
    assert line == b"ready\n", line
