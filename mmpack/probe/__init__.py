"""Where two sides part: the same samples through both, module by module, and the first module and token beyond noise"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.probe.compare import compare
from mmpack.probe.contract import Contract
from mmpack.probe.record import Record, Recorder, Rows
from mmpack.probe.record_file import read_record, write_record
from mmpack.probe.report import First, Kind, ModuleRow, ProbeReport
from mmpack.probe.side import Side, record, run


def chart(reports: Sequence[ProbeReport] | ProbeReport, *args: Any, **options: Any) -> bytes:
    """Layer × error of one report or several as a PNG; see `mmpack.view.probe.chart`."""
    drawn: bytes = importlib.import_module("mmpack.view.probe").chart(reports, *args, **options)
    return drawn


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
