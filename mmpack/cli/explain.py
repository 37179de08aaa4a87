"""`mmpack explain`: what a rule or a cause of drift means, how it shows and how to fix it."""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from typing import Annotated

import typer

from mmpack.cli.output import show, table
from mmpack.errors import ArgumentError

TITLE = re.compile(r"^# (MM\d{3}|[a-z_]+)(?:: (.*))?\n\n(?:Fix: .*\n\n)?", re.MULTILINE)


def command(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="A rule such as MM101 or a cause such as max_pixels."),
    ] = None,
) -> int:
    """Explain a rule or a cause of drift: what it means, how it shows, how to fix it. Without CODE, list all.

    Examples:
        mmpack explain MM101
        mmpack explain max_pixels
    """
    if code is None:
        show([table(("code", "says"), [(name, says) for name, (says, _) in lines().items()])])
    else:
        print(explained(code), end="")
    return 0


def lines() -> dict[str, tuple[str, str]]:
    """Return what each rule and each cause says in a line, and its fix in a line."""
    from mmpack.parity.fixes import FIXES
    from mmpack.schema.codes import RULES

    out = {rule.code: (rule.says, rule.fix) for rule in RULES.values()}
    return out | {cause: (says, FIXES[cause]) for cause, (says, _) in sections("parity").items()}


def sections(room: str) -> dict[str, tuple[str, str]]:
    """Return what a room's `explained.md` holds: code -> (what its title says, text below the title)."""
    text = (files("mmpack") / room / "explained.md").read_text(encoding="utf-8")
    _, *parts = TITLE.split(text)
    return {
        code: (says or "", body.strip() + "\n")
        for code, says, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


def explained(code: str) -> str:
    """Return the text on a code, in any case.

    Raises: ArgumentError, with the nearest names, if there is no such code.
    """
    known = lines()
    by_case = {name.lower(): name for name in known}
    name = by_case.get(code.lower())
    if name is None:
        near = difflib.get_close_matches(code.lower(), by_case, n=3, cutoff=0.5)
        did = " or ".join(by_case[n] for n in near)
        raise ArgumentError(
            f"explain: {code!r:.40} is neither a rule nor a cause. "
            f"Fix: pass {did or 'a name from the list that `mmpack explain` prints'}"
        )
    says, fix = known[name]
    _, body = sections("schema" if name.startswith("MM") else "parity")[name]
    return f"{name}: {says}\nFix: {fix}\n\n{body}"
