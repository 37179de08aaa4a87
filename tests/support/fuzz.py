"""Damaged files for every reader, for some time: `python tests/support/fuzz.py --seconds 600 --keep FOLDER [TARGET …]`.

Each target runs in a process of its own, with bounded address space. The file at which one raises what it must not,
dies or hangs is kept, with its last words beside it, and the exit code is 1. `--again FILE TARGET` tries one file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from support.fuzz_targets import TARGETS, Target

ADDRESS_SPACE = 8 * 2**30
HANG = 120  # seconds over one file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "targets", nargs="*", help=f"of {', '.join(TARGETS)}, or MODULE:NAME; all if none is named"
    )
    parser.add_argument("--seconds", type=float, default=600, help="in all")
    parser.add_argument("--seed", type=int, default=None, help="by default another one each time")
    parser.add_argument(
        "--keep", type=Path, default=Path("build/fuzz"), help="where files that show a fault stay"
    )
    parser.add_argument("--again", type=Path, help="read this file, once")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.targets or [*TARGETS]
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    if args.work:
        return work(find(names[0]), seed, args.seconds, args.work)
    if args.again:
        print("read" if find(names[0]).read(args.again) else "refused")
        return 0
    faults = [
        name for name in names if not fuzzed(name, seed, args.seconds / len(names), args.keep)
    ]
    return 1 if faults else 0


def find(name: str) -> Target:
    if name in TARGETS:
        return TARGETS[name]
    module, _, attribute = name.partition(":")
    target: Target = getattr(importlib.import_module(module), attribute)
    return target


def fuzzed(name: str, seed: int, seconds: float, keep: Path) -> bool:
    """Whether a target took it; prints a line."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        at = Path(folder) / f"file{find(name).suffix}"
        command = [
            sys.executable,
            __file__,
            name,
            "--seconds",
            f"{seconds}",
            "--seed",
            f"{seed}",
            "--work",
            folder,
        ]
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(0.1)
                if at.exists() and time.time() - at.stat().st_mtime > HANG:
                    process.kill()
            said.seek(0)
            words = said.read()
        if process.returncode == 0:
            print(f"{name}: seed {seed}, {words.strip().splitlines()[-1]}", flush=True)
            return True
        keep.mkdir(parents=True, exist_ok=True)
        data = at.read_bytes() if at.exists() else b""
        kept = keep / f"{name.replace(':', '_')}-{hashlib.sha256(data).hexdigest()[:12]}{at.suffix}"
        shutil.copyfile(at, kept) if at.exists() else kept.touch()
        kept.with_suffix(".txt").write_text(words[-10_000:])
        last = (words.strip().splitlines() or ["it said nothing"])[-1][:200]
        print(f"{name}: seed {seed}, exit {process.returncode}: {last}", flush=True)
        print(
            f"  kept; again: python {os.path.relpath(__file__)} --again {kept} {name}", flush=True
        )
        return False


def work(target: Target, seed: int, seconds: float, folder: Path) -> int:
    """In a process of its own: try files until the time is over."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    np.seterr(all="raise", under="ignore")  # as numpy itself does
    at, counts, end = folder / f"file{target.suffix}", [0, 0], time.monotonic() + seconds
    for data in target.files(seed, folder):
        at.write_bytes(data)
        counts[not target.read(at)] += 1
        if time.monotonic() >= end:
            break
    print(json.dumps({"read": counts[0], "refused": counts[1]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
