"""What the probe allows, and what it found: the first module and row that differ, and a line for each module."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mmpack.errors import check_flag, check_number, check_whole, one_line
from mmpack.notebook import Drawn, drawer
from mmpack.probe.digest import FLOOR
from mmpack.probe.places import Places


@dataclass(frozen=True)
class Contract:
    """A row parts at a module if its error is above `factor` × its noise + `floor`.

    The noise of a row at a module is measured, not assumed: each side runs again with every module's output rounded
    another way (`Recorder.shaken`), and what that moves there is what rounding explains there: it grows with depth as
    the model lets it grow, and is that of each side's own dtype. Both sides' noises are added in quadrature, and a row
    has at least the median noise of its module's rows. `floor`: relative, always allowed.

    Where what a module read agrees better than that, so must what it makes of it: an output may be off by `factor` ×
    (the module's own rounding + `gain` × what the noise grows by in the module × the error of its input). So a module
    whose input is equal bit by bit is held to its own rounding, however deep it lies.

    What makes all rows of a module a little longer, or all a little shorter, is found below the noise of a single row
    (an epsilon, a scale): rounding has no sign, so it averages out of the mean growth of the rows' norms. That mean may
    be `factor` × its noise / √(rows, 64 at most) + `pooled_floor`, and `gain` × what the module's input grew by. Stages
    between modules are not held to it, since kernels of attention may round exponentials with a sign; nor are sides of
    unlike dtypes, whose rounded weights have one. `pooled`: False leaves it out.
    """

    factor: float = 6.0
    floor: float = FLOOR
    gain: float = 4.0
    passes: int = 1  # noisy ones, of each side
    pooled: bool = True
    pooled_floor: float = 1e-7

    def __post_init__(self) -> None:
        check_number("probe.Contract", "factor", self.factor, above=0)
        check_number("probe.Contract", "gain", self.gain, above=0)
        check_number("probe.Contract", "floor", self.floor, least=0)
        check_flag("probe.Contract", "pooled", self.pooled)
        check_number("probe.Contract", "pooled_floor", self.pooled_floor, least=0)
        check_whole("probe.Contract", "passes", self.passes, least=0)


@dataclass(frozen=True)
class Kind:
    """Errors of some rows at a module, relative to each row's norm."""

    rows: int
    max_error: float
    bound: float  # of the row that comes nearest to its bound, or exceeds it most
    parted: int  # rows beyond their bounds
    worst: float  # largest error / bound

    def to_dict(self) -> dict[str, Any]:
        return _plain(vars(self))


@dataclass(frozen=True)
class ModuleRow:
    """One entry of the report, in the order of execution. `side`: what went "in", or came "out"."""

    module: str
    side: str
    index: int
    space: str  # `text`, or a tower's rows per patch
    all: Kind
    kinds: dict[str, Kind]  # by modality
    # of the rows' norms on average, from a to b; and what is allowed
    growth: tuple[float, float] | None = None
    broken: int = 0  # rows that are not finite on both sides: not compared
    alone: int = 0  # rows that one side alone recorded: not compared

    @property
    def blind(self) -> bool:
        """Whether there are rows, and none that could be compared."""
        return not self.all.rows and self.broken + self.alone > 0

    @property
    def parts(self) -> bool:
        """Whether a row is beyond its bound, or the mean growth of all rows beyond its own."""
        grown = self.growth is not None and abs(self.growth[0]) > self.growth[1]
        return self.all.parted > 0 or grown

    @property
    def name(self) -> str:
        return f"{self.module}<{self.side}"

    def to_dict(self) -> dict[str, Any]:
        out = {"module": self.module, "side": self.side, "index": self.index, "space": self.space}
        kinds = {name: kind.to_dict() for name, kind in self.kinds.items()}
        missed = {"broken": self.broken, "one_sided": self.alone, "growth": _plain(self.growth)}
        return out | self.all.to_dict() | missed | {"by_modality": kinds}


@dataclass(frozen=True)
class First:
    """Where two sides part first. `token`: index in the sample; of a tower's row the placeholder that it becomes."""

    module: str
    side: str  # the module's input ("in": the fault lies before it) or its output ("out")
    index_of_module: int
    stage: str  # in words
    after: str | None  # the last entry that agrees
    sample: str
    token: int
    modality: str
    error: float
    bound: float
    norms: tuple[float, float]  # of the row, in a and b
    medium: int | None = None  # index in the sample, of a tower's row
    row: int | None = None  # of the medium, in the tower's order
    pooled: bool = False  # no row by itself, but the mean growth of all rows is beyond its bound: the error is that

    @property
    def name(self) -> str:
        return f"{self.module}<{self.side}"

    def to_dict(self) -> dict[str, Any]:
        return _plain(vars(self))

    def __str__(self) -> str:
        where = f"sample {self.sample!r}, token {self.token} ({self.modality})"
        if self.medium is not None:
            where += f", medium {self.medium}, row {self.row}"
        what = "the input of " if self.side == "in" else ""
        if self.pooled:
            where += " and all others, in the mean growth of their norms"
        return one_line(
            f"{what}{self.module}, {where}: error {self.error:.2e}, bound {self.bound:.2e}"
        )


@dataclass(repr=False)
class ProbeReport(Drawn):
    """`first` is None where all rows of all modules agree. `modules`: in the order of execution."""

    a: str
    b: str
    places: Places
    modules: list[ModuleRow]
    first: First | None
    suggests: str | None
    contract: Contract
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    about_a: dict[str, Any] = field(default_factory=dict)
    about_b: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was not compared, other than `only`
    command: str | None = None  # that makes this report again

    @property
    def ok(self) -> bool:
        """Whether nothing parts, and every module that both have was compared."""
        return self.first is None and self.blind is None

    @property
    def blind(self) -> ModuleRow | None:
        """The first module of which no row could be compared: not finite on both sides, or recorded on one."""
        none = not any(m.all.rows for m in self.modules)
        return next((m for m in self.modules if m.blind or none), None)

    def __repr__(self) -> str:
        return one_line(f"ProbeReport({self.summary()})")

    def summary(self) -> str:
        if self.first is None and self.blind is not None:
            return f"NOT COMPARED: {self.a} and {self.b}, no row of {self.blind.name} could be"
        if self.first is None:
            near = max(self.modules, key=lambda m: m.all.worst)
            return (
                f"ALIKE: {self.a} and {self.b}, {len(self.modules)} stages; nearest to its bound is {near.name}, "
                f"{near.all.worst:.2f} of it"
            )
        return f"PARTED: {self.a} and {self.b}, first at {self.first}"

    def lines(self, most: int = 12) -> list[str]:
        """The summary, then what parts and where, by modality."""
        out = [self.summary()]
        if self.first is not None:
            out.append(f"stage: {self.first.stage}")
            out.append(f"look at: {self.suggests}")
            for row in self.modules[self.first.index_of_module :][:most]:
                parts = ", ".join(
                    f"{name} {k.parted}/{k.rows}" for name, k in row.kinds.items() if k.parted
                )
                if row.all.parted:
                    size = f"error up to {row.all.max_error:.1e}, {row.all.worst:.1f} of its bound"
                    out.append(f"  {row.name}: {size}; parted: {parts}")
        for name, names in zip((self.a, self.b), self.only, strict=True):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                out.append(f"only {name} has {', '.join(names[:3])}{more}: not compared")
        out += self.notes
        if self.command:
            out.append(f"again: {self.command}")
        return [one_line(line) for line in out]

    def text(self, most: int = 12) -> str:
        return "\n".join(self.lines(most))

    def to_html(self, *, others: Sequence[ProbeReport] = (), title: str | None = None) -> str:
        """One self-contained page; `others` are drawn in the same chart. As `mmpack.view.probe.html`."""
        return str(drawer("probe_html")(self, others=others, title=title))

    def to_png(
        self, path: str | os.PathLike[str] | None = None, /, *args: Any, **options: Any
    ) -> bytes:
        """Layer × error as a figure; its bytes. As `mmpack.view.probe.png`, which takes other reports, too."""
        return bytes(drawer("probe_png")(self, path, *args, **options))

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "a": self.a,
            "b": self.b,
            "about_a": self.about_a,
            "about_b": self.about_b,
            "first": None if self.first is None else self.first.to_dict(),
            "suggests": self.suggests,
            "contract": vars(self.contract).copy(),
            "modules": [row.to_dict() for row in self.modules],
            "only_a": self.only[0],
            "only_b": self.only[1],
            "notes": self.notes,
            "command": self.command,
        }


def _plain(value: Any) -> Any:
    """As JSON, which has no NaN and no infinities: they become null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
