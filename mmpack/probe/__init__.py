"""Where two sides diverge: runs the same samples through both, and names the first module and token beyond noise"""

from __future__ import annotations

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.probe.record import Rows
from mmpack.probe.record_file import read_record
from mmpack.probe.report import Contract
from mmpack.probe.side import Side, record, run

__all__ = ["Contract", "Rows", "Side", "read_record", "record", "run"]
