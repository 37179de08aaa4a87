"""A record: what one side computed, as digests of each module's rows, and how far rounding alone moves them.

`Recorder` is what a side writes to while it runs. Arrays beyond a budget of bytes lie in a temporary file.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError, check_whole
from mmpack.probe.digest import DIRECTIONS, digest, distance, growth
from mmpack.probe.places import Places

MEMORY = 1 << 30  # bytes of digests in memory
IN, OUT = "in", "out"


@dataclass
class Entry:
    """What went into a module, or came out of it. Rows that were not recorded have norm NaN."""

    module: str
    side: str  # "in" or "out"
    space: str  # of its rows; see `Places`
    values: np.ndarray  # float32 [places, k + 2]
    # float32 [places, 2]: what rounding alone moves, relative to the row's norm: the row, and its norm
    noise: np.ndarray
    source: str | None = None  # of an output: the entry whose row alone the module made its row of
    width: int = 0  # values of a row
    local: float = 0.0  # what the module's own rounding may be, relative to the row's norm
    extra: dict[str, Any] = field(default_factory=dict)  # of a file: what this version doesn't know

    @property
    def name(self) -> str:
        return f"{self.module}<{self.side}"


@dataclass
class Record:
    """One side's entries, in the order in which they were first computed."""

    name: str
    places: Places
    entries: dict[str, Entry]
    directions: int = DIRECTIONS
    seed: int = 0
    about: dict[str, Any] = field(default_factory=dict)  # versions, dtype, layout
    # of what passes through a module of modules, or from one into the next: its name -> that of the entry that holds it
    aliases: dict[str, str] = field(default_factory=dict)
    # what has no axis that could be told to be that of rows
    unplaced: set[str] = field(default_factory=set)
    extra: dict[str, Any] = field(default_factory=dict)  # of a file: what this version doesn't know

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to `path`, which ends in `.probe`; `read_record` reads it. Raises: ArgumentError."""
        from mmpack.probe.record_file import write_record

        write_record(path, self)

    def __repr__(self) -> str:
        p = self.places
        return (
            f"Record({self.name!r}, {len(self.entries)} entries, {len(p.sample_ids)} samples, "
            f"{len(p.tokens)} tokens, {len(p.media)} media)"
        )


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that are recorded: row `take[i]` goes to place `into[i]` of `space`."""

    space: str
    take: torch.Tensor  # int64 [n]
    into: np.ndarray  # int64 [n]

    def part(self, start: int, stop: int) -> Rows:
        """Rows of a tensor that is the part [start, stop) of the recorded rows."""
        into = self.into[start:stop]
        return Rows(self.space, torch.arange(len(into)), into)


class Store:
    """Arrays in memory up to a budget of bytes, then in temporary files, which go with them."""

    def __init__(self, budget: int):
        self.budget, self.held, self.spilled = budget, 0, 0

    def full(self, shape: tuple[int, ...], value: float) -> np.ndarray:
        size = int(np.prod(shape)) * 4
        if not size or self.held + size <= self.budget:
            self.held += size
            return np.full(shape, value, dtype=np.float32)
        self.spilled += size
        # unlinked already: the array alone keeps the bytes
        with tempfile.TemporaryFile(prefix="mmpack_probe_") as file:
            out = np.memmap(file, dtype=np.float32, mode="w+", shape=shape)
        out[...] = value
        return out


class Recorder:
    """What a side's `run` gets: it puts rows in, and asks it for rounding where `noisy` is set.

    In a noisy pass nothing new is recorded: the distance from the first pass becomes the noise of each entry.
    """

    def __init__(
        self,
        name: str,
        places: Places,
        *,
        memory: int = MEMORY,
        directions: int = DIRECTIONS,
        seed: int = 0,
    ):
        check_whole("probe", "memory", memory, least=0)
        check_whole("probe", "directions", directions)
        self.record = Record(name, places, {}, directions, seed)
        self.places = places
        self.store = Store(memory)
        self.noisy = False
        self._draw = 0
        self._order: list[str] = []
        self._last: str | None = None  # entry of this forward
        self._random: dict[Any, torch.Generator] = {}

    def begin(self) -> None:
        """Begin a forward: entries that are new in it stand behind the one that ran before them in it."""
        self._last = None

    def done(self) -> Record:
        """The record, its entries in the order of execution."""
        self.record.entries = {name: self.record.entries[name] for name in self._order}
        return self.record

    def again(self) -> None:
        """Begin a noisy pass over the same samples."""
        self.noisy, self._draw, self._random = True, self._draw + 1, {}

    def put(
        self,
        module: str,
        side: str,
        values: torch.Tensor,
        rows: Rows,
        source: str | None = None,
        terms: int = 1,
    ) -> str:
        """Record rows of `values` [R, …] as what went into ("in") or came out of ("out") a module; the entry's name.

        Args:
            source: the entry that the module read, where each of its rows is made of the same row of that alone.
            terms: how many products the module sums for one value: the width of what it reads.
        """
        if side not in (IN, OUT):
            raise ArgumentError(f"probe: side is {side!r:.40}. Fix: pass 'in' or 'out'")
        name = f"{module}<{side}"
        entry = self.record.entries.get(name)
        if entry is None:
            if self.noisy:
                return name
            count = self.places.count(rows.space)
            entry = Entry(
                module,
                side,
                rows.space,
                self.store.full((count, self.record.directions + 2), np.nan),
                self.store.full((count, 2), 0.0),
                source,
                math.prod(values.shape[1:]),
                local_noise(values.dtype, terms),
            )
            self.record.entries[name] = entry
            at = 0 if self._last is None else self._order.index(self._last) + 1
            self._order.insert(at, name)
        # a module that runs again in one forward stands where it ran first
        if self._last is None or self._order.index(name) > self._order.index(self._last):
            self._last = name
        if entry.space != rows.space:
            return name
        chosen = values.reshape(len(values), -1)[rows.take.to(values.device)]
        made = digest(chosen, self.record.directions, self.record.seed)
        if self.noisy:
            old = entry.values[rows.into]
            moved = np.stack([distance(old, made), np.abs(growth(old, made))], axis=1)
            entry.noise[rows.into] = np.fmax(entry.noise[rows.into], moved)
        else:
            entry.values[rows.into] = made
        return name

    def alias(self, module: str, side: str, entry: str) -> None:
        """Say that what came out of a module is what `entry` holds: kept once, compared where sides differ."""
        self.record.aliases[f"{module}<{side}"] = entry

    def shaken(self, values: torch.Tensor) -> torch.Tensor:
        """`values` with each element rounded another way, by chance: what a sum in another order may do.

        Monte Carlo arithmetic (Parker, 1997): uniform noise of one unit roundoff of the dtype at most, relative to the
        element, and normal noise of two of float32 (float64), relative to the row's root mean square, as sums of terms
        that cancel have.
        """
        if not self.noisy or not values.is_floating_point() or not values.numel():
            return values
        random = self._random.get(values.device)
        if random is None:
            random = torch.Generator(values.device).manual_seed(1_000_003 * self._draw + 17)
            self._random[values.device] = random
        wide = torch.promote_types(values.dtype, torch.float32)
        x = values.to(wide)
        unit = torch.finfo(values.dtype).eps / 2
        sums = torch.finfo(wide).eps  # 2 units
        size = x.square().mean(-1, keepdim=True).sqrt()
        one = torch.empty_like(x).uniform_(-1, 1, generator=random)
        two = torch.empty_like(x).normal_(generator=random)
        return (x + unit * x * one + sums * size * two).to(values.dtype)


def local_noise(dtype: torch.dtype, terms: int) -> float:
    """What a module's own rounding may be, relative to the row's norm, where it sums so many terms.

    As `shaken`, but a sum grows as the root of its terms, of which libraries add 64 and more before the next level.
    """
    if not dtype.is_floating_point:
        return 0.0
    wide = torch.promote_types(dtype, torch.float32)
    sums = torch.finfo(wide).eps * max(1.0, math.sqrt(terms) / 8)
    return torch.finfo(dtype).eps / 2 / math.sqrt(3) + sums
