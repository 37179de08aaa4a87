"""docs/mmpack.1, the manual page, from the command line itself: `python tests/support/manual.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmpack.cli.main import COMMANDS, build

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mmpack.1"
CODES = {
    "0": "fine",
    "1": "a difference, a broken rule, a failed check, or a stale file",
    "2": "bad input or bad usage: one line on stderr",
    "130": "interrupted",
    "141": "the reader of the output went away",
}
VARIABLES = {
    "MMPACK_PROGRESS": "0: no progress bars; 1: bars from the start, as lines where there is no terminal.",
    "MMPACK_BACKEND": "The backend of every op, by name.",
    "MMPACK_ATTENTION": "The backend of attention, by name.",
}


def page() -> str:
    """The page in man(7); without a date or a version, which would make it stale by themselves."""
    group = build()
    lines = [
        '.TH MMPACK 1 "" "mmpack" "User Commands"',
        ".ad l",
        ".nh",
        ".SH NAME",
        f"mmpack \\- {roff(group.help[0].lower() + group.help[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B mmpack",
        ".I COMMAND",
        "[\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]",
        ".SH COMMANDS",
    ]
    for name in COMMANDS:
        lines += command(name, group.commands[name])
    lines += [".SH EXIT STATUS", *entries(CODES)]
    lines += [".SH ENVIRONMENT", *entries(VARIABLES)]
    lines += [".SH EXAMPLES"]
    for name in COMMANDS:
        for line in examples(group.commands[name]):
            lines += [".PP", ".nf", roff(line), ".fi"]
    return "\n".join(lines) + "\n"


def command(name: str, made: Any) -> Iterator[str]:
    """A subsection: usage, what it does, its arguments and options."""
    context = type(made).context_class(made, info_name=name)
    usage = " ".join(made.collect_usage_pieces(context))
    yield f".SS mmpack {roff(name)}"
    yield f"\\fBmmpack {roff(name)}\\fR {roff(usage)}"
    for text in filter(None, (part.strip() for part in made.help.split("\n\n"))):
        yield ".PP"
        yield roff(" ".join(text.split()))
    for parameter in made.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield ".TP"
            yield f"\\fB{roff(record[0])}\\fR"
            yield roff(" ".join(record[1].split())) or "\\&"


def examples(made: Any) -> list[str]:
    """The command lines that `--help` ends with."""
    return str(made.epilog).split("\n\n")[1:]


def entries(named: dict[str, str]) -> Iterator[str]:
    for name, text in named.items():
        yield from (".TP", f"\\fB{roff(name)}\\fR", roff(text))


def roff(text: str) -> str:
    """Escaped: backslashes, hyphens that are minus signs, and what roff takes for a request at the start of a line."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = text.replace("|", "|\\:").replace("&", "&\\:")  # where a long word may break
    text = "".join(c if ord(c) < 128 else f"\\[u{ord(c):04X}]" for c in text)
    return f"\\&{text}" if text[:1] in (".", "'") else text


if __name__ == "__main__":
    from generated import keep

    sys.exit(keep(__doc__, "tests/support/manual.py", {PAGE: page()}))
