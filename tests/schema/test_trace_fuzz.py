"""Broken files give samples or a TraceError of one line: never a crash, another error, or much memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def run_fuzz(suffix: str, count: int, seed: int, folder: Path) -> dict[str, int]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    script = TESTS / "support" / "trace_fuzz.py"
    done = subprocess.run(
        [sys.executable, str(script), suffix, str(count), str(seed), str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return json.loads(done.stdout)


def check(result: dict[str, int], count: int) -> None:
    assert result["read"] + result["refused"] == count
    # a checksum refuses nearly all of zstd
    assert result["read"] >= 1 and result["refused"] > count // 4, result
    assert result["peak_mib"] < 1024, result


@pytest.mark.parametrize(
    ("suffix", "count"),
    [
        *((".jsonl", 1000), (".jsonl.zst", 500), (".parquet", 200)),
        pytest.param(".parquet", 3_000, marks=pytest.mark.slow),
    ],
)
def test_fuzz(tmp_path, suffix, count):
    check(run_fuzz(suffix, count, 0, tmp_path), count)
