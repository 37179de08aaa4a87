"""Forward and backward of a GRPO batch by every peer, checked, timed and held to its FLOPs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.step import agreement, report, timing
from benchmarks.step.job import MAX_ROWS, TINY_ROWS, Job
from benchmarks.step.models import MODELS, build, patch_by_liger, shard
from benchmarks.step.peers import PEERS, Peer
from benchmarks.step.ranks import of_this_run, summed
from benchmarks.step.work import step_flops
from benchmarks.step.workloads import WORKLOADS, draw, tiny
from mmpack.errors import ArgumentError, ModelError, check_name, installed_version
from mmpack.ops import first_use
from mmpack.progress import progress

FULL = "out of memory"
WRONG = "its results are wrong"
SHOWN = 6  # errors in a line


@dataclass(frozen=True)
class Options:
    """What to measure, and where it goes. `layers` and `tiny` cut the models, for a try."""

    models: list[str]
    workloads: list[str]
    peers: list[str]
    out: Path | None = None
    again: bool = False
    repeats: int = 3
    layers: int | None = None
    tiny: bool = False
    fsdp: bool = False
    liger: bool = False
    profile: bool = False


@dataclass
class Case:
    """One model and workload; what all peers are held to is made when the first needs it.

    `build(exact=False)`: the model in its dtype, or in one of more digits.
    """

    job: Job
    build: Callable[..., Any]
    want: agreement.Result | None = None
    allowed: agreement.Distance | None = None
    rate: float = 0.0  # FLOP/s of the bare product

    def hold_to(self) -> tuple[agreement.Result, agreement.Distance]:
        """The oracle's result, and the padded peer's error, by fresh models."""
        if self.want is None or self.allowed is None:
            model = self.build()
            self.rate = timing.product_rate(model, self.job)
            found = agreement.result(model, self.job, PEERS["padded"])
            del model
            timing.free()
            self.want = agreement.oracle(self.build(exact=True), self.job)
            self.allowed = agreement.distance(found, self.want)
            timing.free()
        return self.want, self.allowed


def run(options: Options, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure what the report lacks, a row at a time, and return the report of `options.out`, or of this run.

    `say` gets a line per row.

    Raises: ArgumentError for names that don't exist and files that are no report; MissingExtraError for a peer whose
    package is missing; ModelError where memory runs out on one rank of several, after the row is written.
    """
    for name, chosen, known in (
        ("model", options.models, MODELS),
        ("workload", options.workloads, WORKLOADS),
        ("peer", options.peers, PEERS),
    ):
        for one in chosen:
            check_name("benchmarks.step", name, one, known)
    if options.repeats < 2:
        raise ArgumentError(
            "benchmarks.step: a median needs 2 repeats or more. Fix: pass --repeats 2"
        )
    if options.liger:
        patch_by_liger(options.models)
    made: list[dict[str, Any]] = []
    total = len(options.models) * len(options.workloads) * len(options.peers)
    with (
        of_this_run(options.fsdp) as (device, rank, ranks),
        progress("measuring", total) as done,
    ):
        if rank > 0 or say is None:
            say = _silent
        for name in options.models:
            for workload in options.workloads:
                case = case_of(options, name, workload, device, rank, ranks)
                for peer in options.peers:
                    row = _names(options, name, workload, peer, device, ranks)
                    if not options.again and report.has(report.read(options.out), row):
                        say(f"{_label(row)}: there already")
                        done(1)
                        continue
                    if device.type == "cpu" and not options.tiny and options.layers is None:
                        raise ArgumentError(
                            f"benchmarks.step: {name} in its real shapes needs a GPU, but torch finds none. "
                            "Fix: use --tiny on a CPU"
                        )
                    row |= _measure(case, PEERS[peer], options)
                    made.append(report.short(row))
                    full = row.get("did_not_run") == FULL
                    if rank == 0 or full:
                        report.add(options.out, row)
                    say(f"{_label(row)}: {_said(row)}")
                    done(1)
                    if full and ranks > 1:
                        raise ModelError(
                            f"benchmarks.step: {_label(row)} ran out of memory on rank {rank}, and other "
                            "ranks wait for it. Fix: start again; finished rows are kept"
                        )
    if options.out is None:
        return {"op": report.OP, "machines": {}, "rows": made}
    return report.read(options.out)


def peers_here() -> list[str]:
    """The peers whose packages are installed."""
    return [n for n, p in PEERS.items() if p.package is None or installed_version(p.package)]


def case_of(
    options: Options, name: str, workload: str, device: torch.device, rank: int = 0, ranks: int = 1
) -> Case:
    """Samples on `device`, and how the model is built."""
    size = tiny(WORKLOADS[workload]) if options.tiny else WORKLOADS[workload]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    samples, advantages = draw(size, MODELS[name].family, dtype)
    on_device = torch.tensor(advantages, dtype=torch.float32, device=device)
    rows = TINY_ROWS if options.tiny else MAX_ROWS
    job = Job(samples, on_device, device, rows, rank, ranks)

    def make(exact: bool = False) -> Any:
        model = build(name, device, options.layers, options.tiny)
        if exact:
            model = model.to(torch.float64 if dtype == torch.float32 else torch.float32)
        return shard(model) if ranks > 1 else model

    return Case(job, make)


def _measure(case: Case, peer: Peer, options: Options) -> dict[str, Any]:
    """The rest of a row. Memory that runs out is a row."""
    try:
        row = _timed(case, peer, options)
    except torch.OutOfMemoryError:
        row = {"did_not_run": FULL}
    timing.free()  # here no frame of the step holds tensors
    return row


def _timed(case: Case, peer: Peer, options: Options) -> dict[str, Any]:
    """The first step, the check, then the steps that count."""
    want, allowed = case.hold_to()
    job, model = case.job, case.build()
    if job.device.type == "cuda":
        first_use.watch_triton()
    with peer.prepared(model):
        compiled = first_use.compiled_so_far()
        first = timing.seconds_of(lambda: timing.take_step(model, job, peer), job.device)
        compiled = first_use.compiled_so_far() - compiled
        error = agreement.distance(agreement.result(model, job, peer), want)
        if beyond := error.beyond(allowed, model.lm_head.weight.dtype):
            return {"did_not_run": WRONG, "beyond": beyond, **_checked(error, allowed)}
        steps = timing.timed_steps(model, job, peer, options.repeats)
        row = _figures(model, job, peer, steps, case.rate) | {"first_seconds": first}
        row |= {"compiled_in_first": compiled}
        row |= _checked(error, allowed)
        if options.profile:
            from benchmarks.step.profile import profiled

            row["profile"] = profiled(model, job, peer)
    return row


def _figures(model: Any, job: Job, peer: Peer, steps: timing.Timed, rate: float) -> dict[str, Any]:
    """The columns: of all ranks together, where a rank has its own the largest."""
    flops = step_flops(model, steps.works, peer.head_again).total
    rows, patches, all_flops = summed(
        [
            float(sum(work.rows for work in steps.works)),
            float(sum(work.patches for work in steps.works)),
            flops,
        ]
    )
    ideal = all_flops / rate / job.ranks
    return {
        "seconds": steps.median,
        "peak_bytes": steps.peak_bytes,
        "rows": int(rows),
        "patches": int(patches),
        "tokens": job.tokens,
        "loss_tokens": job.total_tokens,
        "tokens_per_second": job.tokens / steps.median,
        "flops": all_flops,
        "product_flops_per_second": rate,
        "ideal_seconds": ideal,
        "of_ideal": ideal / steps.median,
        "repeats": len(steps.seconds),
    }


def _checked(error: agreement.Distance, allowed: agreement.Distance) -> dict[str, Any]:
    """How far the peer is from the oracle, and how far the padded peer is."""
    return {"error": asdict(error), "padded_error": asdict(allowed)}


def _names(
    options: Options, model: str, workload: str, peer: str, device: torch.device, ranks: int
) -> dict[str, Any]:
    """What the row is a measurement of."""
    cuda = device.type == "cuda"
    chosen = {
        "attention": os.environ.get("MMPACK_ATTENTION"),
        "tower_attention": os.environ.get("MMPACK_TOWER_ATTENTION"),
        "liger": options.liger or None,
        "layers": options.layers,
        "tiny": options.tiny or None,
    }
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "model": model,
        "workload": workload,
        "peer": peer,
        "ranks": ranks,
        "options": {name: value for name, value in chosen.items() if value is not None},
    }


def _label(row: dict[str, Any]) -> str:
    more = [f"{name}={value}" for name, value in row["options"].items()]
    more += [f"{row['ranks']} ranks"] * (row["ranks"] > 1)
    return " ".join([row["model"], row["workload"], row["peer"], *more])


def _said(row: dict[str, Any]) -> str:
    if row.get("did_not_run") == WRONG:
        shown = row["beyond"][:SHOWN]
        own, padded = (
            ", ".join(f"{name} {_error_of(name, row[of]):.2g}" for name in shown)
            for of in ("error", "padded_error")
        )
        more = len(row["beyond"]) - len(shown)
        rest = f"; {more} more kinds of weight are beyond" if more else ""
        return f"{WRONG}: errors {own}; the padded peer's {padded}{rest}"
    if "did_not_run" in row:
        return str(row["did_not_run"])
    memory = f", {row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else ""
    compiled = f", {row['compiled_in_first']} kernels compiled" * bool(row["compiled_in_first"])
    return (
        f"{row['seconds']:.3g} s (first {row['first_seconds']:.3g} s{compiled}), {row['rows']:,} rows, "
        f"{row['patches']:,} patches{memory}, {row['of_ideal']:.0%} of the ideal"
    )


def _error_of(name: str, errors: dict[str, Any]) -> float:
    """Of all gradients, of logprobs, or of a kind of weight."""
    found: float = (errors | errors["kinds"]).get(name, 0.0)
    return found


def _silent(text: str) -> None:
    pass
