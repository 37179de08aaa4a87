"""What `mp.compare` says of a pair of samples, whichever side is which."""

from __future__ import annotations

from typing import Any

import mmpack as mp


def check(
    left: mp.Sample, right: mp.Sample, causes: str = "", *words: str, **options: Any
) -> mp.ParityReport:
    """Both directions name `causes` (none: equal), these in the order of findings; their text holds `words`."""
    report = mp.compare([left], [right], **options)
    found = list(dict.fromkeys(f.cause for f in report.findings))
    assert found == causes.split(), report.lines()
    assert report.ok == (not causes) and report.first == (report.findings or [None])[0]
    assert set(mp.compare([right], [left], **options).causes) == set(found)
    text = " | ".join(map(str, report.findings))
    missing = [part for part in words if part not in text]
    assert not missing, (missing, text)
    return report
