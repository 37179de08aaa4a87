"""Write docs/causes.md, and what the examples of rules print: `python docs/site/explained.py [CODE…] [--check]`.

The texts of `mmpack explain` are written by hand, but for what a command prints (```console) and what a block of Python
prints or raises (the ```text after it). Blocks of one rule run in order, in an empty folder.
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

from mmpack.cli.explain import lines, sections
from mmpack.cli.main import main as mmpack
from mmpack.errors import MmpackError
from mmpack.schema.codes import RULES

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "mmpack" / "schema" / "explained.md"
CAUSES = ROOT / "docs" / "causes.md"
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
FIX = "## How to fix it\n"


@dataclass
class Shown:
    """A rule's text as it should be, and what its blocks printed, above and below the heading of the fix."""

    text: str
    broken: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)


def shown(page: str, code: str) -> Shown:
    """Run the blocks of a rule's text in the current folder."""
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

    out.text = BLOCK.sub(fresh, page)
    return out


def _run_python(source: str, names: dict[str, Any], code: str) -> str:
    """What a block prints; an error of mmpack's ends it, and is its last line."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            exec(compile(source, f"{TEXTS.name}: {code}", "exec"), names)
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


def causes_markdown() -> str:
    """Return the page of the causes: one row each."""
    said = lines()
    rows = [
        f'| <a id="{name}"></a>`{name}` | {said[name][0]} | {said[name][1]} |'
        for name in sections("parity")
    ]
    head = """# Causes of drift

What `mmpack parity` can name, in the order in which a pipeline runs into them: an earlier cause is the root of later
ones. `mmpack explain CAUSE` says how it looks in a run, why it happens, what parity needs to see it, and how to fix it
on either side. `fixtures/causes/CAUSE` holds a pair of traces that upstream code made, where it can make one, and what
parity prints on it. This table is generated: do not edit.

| cause | what happened | fix |
| --- | --- | --- |
"""
    return head + "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("codes", nargs="*", help="such as MM101; all if none is named")
    parser.add_argument("--check", action="store_true", help="exit 1 and name what is stale")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    texts = sections("schema")
    fresh = dict(texts)
    failed = False
    for code in options.codes or RULES:
        try:
            text = shown_in_a_folder_of_its_own(texts[code][1], code).text
        except Exception:
            print(f"{code} can't be run: {traceback.format_exc(limit=-2)}", file=sys.stderr)
            failed = True
            continue
        fresh[code] = ("", text)
        if options.check and text != texts[code][1]:
            print(f"{code} is stale. Fix: python docs/site/explained.py {code}", file=sys.stderr)
            failed = True
    files = {
        TEXTS: "\n".join(f"# {code}\n\n{text}" for code, (_, text) in fresh.items()),
        CAUSES: causes_markdown(),
    }
    for path, text in files.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            print(f"{path} is stale. Fix: python docs/site/explained.py", file=sys.stderr)
            failed = True
        else:
            path.write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
