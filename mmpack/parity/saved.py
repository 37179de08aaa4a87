"""A report and its drift out of JSON, as `ParityReport.to_json` and `mmpack parity --format json` write them."""

from __future__ import annotations

import typing
from functools import cache
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, one_line
from mmpack.parity.drift import DRIFT_FIXES, LogprobDrift
from mmpack.parity.report import ParityReport
from mmpack.schema.saved import built, read_saved

MAX_FILE = 2**30  # bytes
FIX = "name a file that `mmpack parity A B --out FILE` wrote"
UNSAVED = ("pairs",)  # fields of a report that its JSON doesn't hold


def read_report(path: str | Path) -> tuple[ParityReport, LogprobDrift | None]:
    """The report of a file, and its drift where both sides had logprobs.

    The report has no `pairs`: samples are in the traces alone. Raises: ArgumentError for a file that holds no report.

    Example:
        >>> import mmpack as mp, tempfile, pathlib
        >>> from mmpack.parity.saved import read_report
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "report.json"
        >>> _ = path.write_text(mp.compare([], []).to_json())
        >>> read_report(path)[0].summary()
        'parity NOT ok: 0 samples compared, 0 findings'
    """
    where = f"read_report: {path}"
    return report_of(read_saved(path, MAX_FILE, where, ArgumentError, FIX), where)


def report_of(document: Any, where: str) -> tuple[ParityReport, LogprobDrift | None]:
    """The same of a parsed file; `where` begins an error."""
    if not is_report(document):
        raise ArgumentError(f"{where} holds no parity report. Fix: {FIX}")
    try:
        report = built(ParityReport, document, _hints)
        drift = document.get("drift")
        found = built(LogprobDrift, drift, _hints) if drift and "tokens" in drift else None
        if found and not found.causes.keys() <= DRIFT_FIXES.keys():
            raise ValueError("its drift has a cause that is unknown")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = one_line(str(error))[:200]
        raise ArgumentError(f"{where} is damaged ({why}). Fix: {FIX}") from None
    return report, found


def is_report(document: Any) -> bool:
    """Whether a parsed file says that it is a report: it has a verdict, its findings and their causes."""
    return (
        isinstance(document, dict) and {"ok", "compared", "findings", "causes"} <= document.keys()
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields; Sample is named where it is not imported."""
    hints = typing.get_type_hints(kind, localns={"Sample": object})
    return {name: hint for name, hint in hints.items() if name not in UNSAVED}
