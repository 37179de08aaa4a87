"""What the pages of docs/rules/ show of the machine, written anew: `python docs/site/rule_pages.py [--check]`.

The pages are written by hand, but for three things: the title, which is the rule's, what a command prints (```console)
and what a block of Python prints or raises (the ```text after it). Blocks of a page run in order, in an empty folder.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
import traceback
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmpack.cli.main import main as mmpack
from mmpack.errors import MmpackError
from mmpack.schema.codes import RULES

PAGES = Path(__file__).resolve().parents[1] / "rules"
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r"\A# .*\n")
FIX = "## How to fix it\n"


@dataclass
class Shown:
    """A page as it should be, and what its blocks printed, above and below the heading of the fix."""

    text: str
    broken: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)


def shown(page: str, code: str) -> Shown:
    """Run the blocks of a page in the folder that is current."""
    names: dict[str, Any] = {}
    said = ""  # by the last block of Python
    out = Shown("")
    below = page.index(FIX)

    def fresh(found: re.Match[str]) -> str:
        nonlocal said
        kind, body = found[1], found[2]
        if kind == "python":
            said = _run_python("\n" * page.count("\n", 0, found.start(2)) + body, names, code)
            return found[0]
        body = said if kind == "text" else _run_commands(body)
        (out.broken if found.start() < below else out.fixed).append(body)
        return f"```{kind}\n{body}```\n"

    out.text = BLOCK.sub(fresh, TITLE.sub(f"# {code}: {RULES[code].says}\n", page))
    return out


def _run_python(source: str, names: dict[str, Any], code: str) -> str:
    """What a block prints; an error of mmpack's ends it, and is its last line."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            exec(compile(source, f"docs/rules/{code}.md", "exec"), names)
        except MmpackError as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def _run_commands(body: str) -> str:
    """Each `$ mmpack …` of a block, and what it prints to either stream."""
    printed = io.StringIO()
    for line in body.splitlines():
        if line.startswith("$ mmpack "):
            print(line, file=printed)
            with redirect_stdout(printed), redirect_stderr(printed):
                mmpack(line.split()[2:])
    return printed.getvalue()


def shown_in_a_folder_of_its_own(page: str, code: str) -> Shown:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return shown(page, code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("codes", nargs="*", help="such as MM101; all if none is named")
    parser.add_argument("--check", action="store_true", help="exit 1 and name the stale pages")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = False
    for code in options.codes or RULES:
        path = PAGES / f"{code}.md"
        try:
            page = path.read_text(encoding="utf-8")
            text = shown_in_a_folder_of_its_own(page, code).text
        except Exception:
            print(f"{path} can't be run: {traceback.format_exc(limit=-2)}", file=sys.stderr)
            failed = True
            continue
        if text == page:
            continue
        if options.check:
            print(f"{path} is stale. Fix: python docs/site/rule_pages.py {code}", file=sys.stderr)
            failed = True
        else:
            path.write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
