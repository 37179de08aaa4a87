"""Files that a script makes: written, or with --check compared, which fails where one is stale."""

import argparse
import sys
from pathlib import Path


def keep(about: str, script: str, wanted: dict[Path, str]) -> int:
    """Write the files of `wanted` that differ; with --check only name them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is stale")
    check = parser.parse_args().check
    read = {path: path.read_text("utf-8") if path.exists() else None for path in wanted}
    stale = [path for path, text in wanted.items() if read[path] != text]
    for path in stale:
        if check:
            print(f"{path} is stale. Fix: python {script}", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(check and bool(stale))


def between(page: Path, begin: str, end: str, text: str) -> str:
    """Return the page with `text` between the marks. Exits where a mark is gone."""
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has lost its marks. Fix: add {begin.strip()} … {end.strip()}")
    return head + begin + text + end + tail
