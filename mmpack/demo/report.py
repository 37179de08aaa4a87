"""What a smoke run prints and returns: one line with a figure per check, and the peak memory of a block."""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass
class Report:
    """What `--json` prints; `failed` names the checks that did not hold."""

    console: Console = field(default_factory=Console)
    values: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "failed": self.failed} | self.values

    def check(self, name: str, fine: bool, figure: str) -> None:
        mark = "[green]ok[/]" if fine else "[red]FAILED[/]"
        self.console.print(f"{mark} {name}: ", end="")
        self.console.print(figure, markup=False, highlight=False, soft_wrap=True)
        if not fine:
            self.failed.append(name)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def memory(self) -> PeakMemory:
        return PeakMemory()


class PeakMemory:
    """The process's largest resident memory inside the block, above what it had before; on Linux only."""

    megabytes: float | None = None

    def __enter__(self) -> PeakMemory:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # memory kept from before would hide what this block takes
        self.stop = threading.Event()
        self.before = self.peak = resident()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.stop.wait(0.005):
            self.peak = max(self.peak, resident())

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()
        self.megabytes = (self.peak - self.before) / 1e6 if self.before else None


def resident() -> int:
    """Bytes; 0 where there is no /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
