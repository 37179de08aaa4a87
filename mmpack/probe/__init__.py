"""Where two sides part: the same samples through both, module by module, and the first module and token beyond noise"""

from __future__ import annotations

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.probe.compare import compare
from mmpack.probe.contract import Contract
from mmpack.probe.record import Record, Recorder, Rows
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
    "compare",
    "record",
    "run",
]
