"""Where two sides diverge: runs the same samples through both, and names the first module and token beyond noise"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.notebook import drawer
from mmpack.probe.compare import compare
from mmpack.probe.contract import Contract
from mmpack.probe.record import Record, Recorder, Rows
from mmpack.probe.record_file import read_record, write_record
from mmpack.probe.report import First, Kind, ModuleRow, ProbeReport
from mmpack.probe.side import Side, record, run

__all__ = [
    "Contract",
    "First",
    "Kind",
    "ModuleRow",
    "ProbeReport",
    "Record",
    "Recorder",
    "Rows",
    "Side",
    "chart",
    "compare",
    "read_record",
    "record",
    "run",
    "write_record",
]


def chart(
    reports: Sequence[ProbeReport] | ProbeReport,
    path: str | os.PathLike[str] | None = None,
    *,
    labels: Sequence[str] | None = None,
    title: str = "Where two sides part",
) -> bytes:
    """Layer × error of one report or several as a PNG, on one scale; its bytes. As `mmpack.view.probe.chart`."""
    return bytes(drawer("probe_chart")(reports, path, labels=labels, title=title))
