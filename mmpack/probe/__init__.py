"""Where two sides part: the same samples through both, module by module, and the first module and token beyond noise"""

from __future__ import annotations

from collections.abc import Callable

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.probe.compare import compare
from mmpack.probe.contract import Contract
from mmpack.probe.record import Record, Recorder, Rows
from mmpack.probe.record_file import read_record, write_record
from mmpack.probe.report import First, Kind, ModuleRow, ProbeReport
from mmpack.probe.side import Side, record, run

# a figure of several reports: set by `mmpack.view.probe`, which stands above this room
chart: Callable[..., bytes]

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
    "compare",
    "read_record",
    "record",
    "run",
    "write_record",
]
