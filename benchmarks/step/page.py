"""The step's benchmark in Markdown: the section of docs/performance.md, the page of all rows, README's headline."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.step.figures import BARS, PADDED, figures, name_of
from benchmarks.step.figures import seconds as in_seconds
from benchmarks.step.targets import HEADLINE, targets
from benchmarks.step.workloads import WORKLOADS

SECTION = """## A whole training step

Forward and backward of one GRPO batch in bf16 with gradient checkpointing, random weights in the models' real shapes: 4
prompts with 8 responses to each (4 where responses are long).{padded} *Packing without padding* is done as verl does,
with mmpack's attention. [All rows](../benchmarks/results/step.md): memory, first steps, every peer that was measured,
and how.
"""
RUN = """```sh
python -m benchmarks.step  # all that the report lacks, row by row; stop and start it as you like
python -m benchmarks.step --model qwen2.5-vl-7b --workload geo --peer padded --peer shared --profile
torchrun --nproc-per-node 2 -m benchmarks.step --fsdp --model qwen2.5-vl-3b --out benchmarks/results/step.json
```
"""
PAGE_HEAD = "# Performance: the whole step\n"
PAGE = """Made by `benchmarks/render.py` from `benchmarks/results/`; in short: [performance](../../docs/performance.md).

Each peer is checked on three samples before it is timed. {held}

Seconds are the median of at least two steps after the first. *First* is the first step of its peer in a process.
{compiles} *Ideal* is the time that the FLOPs of linear layers, head, tower and visible attention (forward,
recomputation, backward) take at the rate of cuBLAS's product in the same run. It includes what a peer computes without
need: padding, or a prompt once more. Recomputation counts in full, though torch skips each layer's last product.

Each row had its cards to itself; other cards of its host were often at work.

Rows not held kind by kind (below) are the oldest. Where their tower had mmpack's attention, pictures of 1,024 patches
and more ran FlashAttention-4 without padding, whose dq was wrong. In the others they ran `varlen_attn`, or
FlashAttention-4 [with padding](../../docs/gpu.md#heads-that-flashattention-4-gets-wrong-on-hopper), as mmpack does now.
"""
BY_KIND = (
    "`python -m benchmarks.step` compares gradients of the first and the last layer of decoder and tower, and of all "
    "weights outside layers except the embedding and the head: all together, and each kind by itself, whose error may "
    "be 3 × the padded batch's. A kind is one module's weight or bias; a tower's q, k and v are three. It also "
    "compares the norm of all gradients. "
)
LIGER = """\
This transformers, which Liger still supports, encodes pictures within the forward, and in plain packs once per sample
(*patches* counts each picture once). So compare rows of this table only with each other. `liger` is the padded batch
with mmpack's attention in the tower, transformers' layers and Liger's GRPO loss, which gives no logprobs: only its
gradients are checked. *Liger* behind a peer: with its layers.
"""
_COLUMNS = (
    *("model", "workload", "peer", "s", "first", "peak", "rows", "patches", "tokens/s"),
    *("ideal s", "of ideal"),
)


def whole_runs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of whole models on one GPU without options, of the device that has most of them."""
    plain = [row for row in rows if row["ranks"] == 1 and not row["options"]]
    devices = [row["device"] for row in plain]
    most = max(dict.fromkeys(devices), key=devices.count, default=None)
    return [row for row in plain if row["device"] == most]


def title_of(rows: list[dict[str, Any]]) -> str:
    """What the chart of `whole_runs` is called."""
    return f"Seconds of a training step, {rows[0]['device']}"


def machine(report: dict[str, Any], device: str) -> str:
    """A line of a device and its versions."""
    versions = (f"{name} {version}" for name, version in report["machines"][device].items())
    return f"{device}, {', '.join(versions)}.\n"


def section(
    rows: list[dict[str, Any]], image: str, ran: str, every_row: list[dict[str, Any]]
) -> str:
    """Of `whole_runs`: the chart at `image`, what it `ran` on, one table; and what every row is to reach."""
    parts = [_wrapped(SECTION.format(padded=_padded(rows)))]
    if rows:
        parts += [f"![{title_of(rows)}]({image})\n", ran, RUN, _table(*_summary(rows))]
        every = targets(every_row)
        missed = [f"- {target}" for target in every if not target.met]
        met = len(every) - len(missed)
        parts.append(
            _wrapped(
                f"The step meets {met} of its {len(every)} targets, which `python -m benchmarks.step` prints. "
                "Ratios are of seconds; an ideal is the time that the FLOPs alone take.\n"
            )
        )
        parts += ["\n".join(missed) + "\n"] * bool(missed)
    else:
        parts.append(RUN)
    return "\n".join(parts)


def headline(rows: list[dict[str, Any]], image: str, png: str, width: int, link: str) -> str:
    """README's lines: the chart, and what it shows; nothing without rows."""
    if not rows:
        return ""
    parts = [f'<img src="{image}" alt="{title_of(rows)}" width="{width}">\n']
    said = (
        f"Forward and backward of 4 prompts with {WORKLOADS[HEADLINE[1]].about}, 8 responses to each, "
        f"{rows[0]['device']}.{_padded(rows)} *Packing without padding* is done as verl does, with mmpack's attention. "
        f"[How it is measured, with all figures]({link}); the chart [as PNG]({png}).\n"
    )
    return "\n".join([*parts, _wrapped(said)])


def all_rows(report: dict[str, Any], chart: str = "") -> str:
    """The page of every row, by device, and where the time of profiled ones goes; `chart`: lines before them."""
    text = PAGE.format(held=_held(report["rows"]), compiles=_compiles(report["rows"]))
    parts = [PAGE_HEAD, *[chart] * bool(chart), _wrapped(text), _held_by_kind(report["rows"])]
    for device, versions in report["machines"].items():
        rows = sorted((r for r in report["rows"] if r["device"] == device), key=_order)
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts += [
            f"## {device}\n",
            f"{said}.\n",
            _table([*_COLUMNS], [_cells(row) for row in rows]),
        ]
        profiles = [row for row in rows if "profile" in row]
        if profiles:
            names = list(dict.fromkeys(name for row in profiles for name in row["profile"]))
            body = [
                [*_names(row), *(f"{row['profile'].get(name, 0.0):.2f}" for name in names)]
                for row in profiles
            ]
            parts.append("Seconds by class of kernel; `idle`: without any.\n")
            parts.append(_table([*_COLUMNS[:3], *names], body))
    return "\n".join(parts)


def _held_by_kind(rows: list[dict[str, Any]]) -> str:
    """How gradients are held, and how many of the rows were held kind by kind."""
    ran = [row for row in rows if "did_not_run" not in row]
    by_kind = sum("kinds" in row.get("error", {}) for row in ran)
    many = f"{by_kind or 'None'} of the {len(ran)} rows with times"
    rest = ""
    if by_kind < len(ran):
        others = [row for row in ran if "kinds" not in row.get("error", {})]
        rest = f"; the others were measured before it was checked: {_listed(others)}"
    if not by_kind:
        rest = ": they were measured before it was checked"
    return _filled(f"{BY_KIND}{many} were held so{rest}.") + "\n"


def _listed(rows: list[dict[str, Any]]) -> str:
    """Rows by model, workload and GPUs, each with its peers."""
    peers: dict[str, list[str]] = {}
    for row in sorted(rows, key=_order):
        case = ", ".join([f"{row['model']} {row['workload']}", *_ran_with(row)])
        peers.setdefault(case, []).append(f"`{row['peer']}`")
    return "; ".join(f"{case} ({', '.join(found)})" for case, found in peers.items())


def liger_rows(report: dict[str, Any]) -> str:
    """For the same page: rows with and without Liger's kernels, in a report of their own for their transformers."""
    parts = []
    for device, versions in report["machines"].items():
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        rows = [row for row in report["rows"] if row["device"] == device]
        parts += [
            f"## Liger's kernels, {device}\n",
            f"{said}.\n",
            LIGER,
            _table([*_COLUMNS], [_cells(row) for row in rows]),
        ]
    return "\n".join(parts)


def _padded(rows: list[dict[str, Any]]) -> str:
    """What `padded, best` is the best of."""
    timed = {row["peer"] for row in rows if "seconds" in row}
    ways = [f"{about} (`{peer}`)" for peer, about in PADDED.items() if peer in timed]
    if not ways:
        return ""
    if len(ways) == 1:
        return (
            f" *Padded, best* is padded {ways[0]}: "
            "of the padded batches, only this one was timed with this transformers."
        )
    return f" *Padded, best* is the fastest padded batch that was timed: {', or '.join(ways)}."


def _held(rows: list[dict[str, Any]]) -> str:
    """What the rows were checked against: the newer ones with `error`, those before with `separate`."""
    older = sum("separate" in row for row in rows)
    text = (
        "The error of its logprobs and gradients against float32, one sample at a time, may be 1.5 × that of the "
        "padded bf16 batch, or the contract's floor (5e-3 for gradients, 1e-5 nats for logprobs)."
    )
    if older:
        text += (
            f" {older} of the {len(rows)} rows here were checked in an earlier way: their difference from the padded "
            "bf16 batch was held to 1.5 × that of single samples in bf16."
        )
    return text


def _compiles(rows: list[dict[str, Any]]) -> str:
    unknown = sum("seconds" in row and "compiled_in_first" not in row for row in rows)
    but = f" (not recorded for {unknown} of the {len(rows)} rows)" if unknown else ""
    return f"*Compiles* marks one that compiled kernels which the caches on disk lacked{but}."


def _wrapped(text: str) -> str:
    """Paragraphs of at most 120 columns; headings stay."""
    parts = text.rstrip("\n").split("\n\n")
    return "\n\n".join(map(_filled, parts)) + "\n"


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_on_hyphens=False, break_long_words=False)


def _summary(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Seconds of each bar of the chart; a bar that nothing was measured for has no column."""
    found = figures(rows)
    shown = [at for at in range(len(BARS)) if any(bars[at] is not None for bars in found.values())]
    body = [
        [name_of(model), WORKLOADS[workload].about, *(_bar(bars[at]) for at in shown)]
        for (model, workload), bars in found.items()
    ]
    labels = [*BARS]
    return ["model", "workload", *(labels[at] for at in shown)], body


def _cells(row: dict[str, Any]) -> list[str]:
    if "did_not_run" in row:
        return [*_names(row), row["did_not_run"], *[""] * (len(_COLUMNS) - 4)]
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.0f} GB"
    return [
        *_names(row),
        f"{row['seconds']:.2f}",
        f"{row['first_seconds']:.2f}" + ", compiles" * bool(row.get("compiled_in_first")),
        peak,
        *(f"{row[name]:,.0f}" for name in ("rows", "patches", "tokens_per_second")),
        *(f"{row[name]:.2f}" for name in ("ideal_seconds", "of_ideal")),
    ]


def _names(row: dict[str, Any]) -> list[str]:
    return [row["model"], row["workload"], ", ".join([f"`{row['peer']}`", *_ran_with(row)])]


def _ran_with(row: dict[str, Any]) -> list[str]:
    """GPUs and options."""
    gpus = [f"{row['ranks']} GPUs"] * (row["ranks"] > 1)
    return gpus + [n if v is True else f"{n} {v}" for n, v in row["options"].items()]


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """By model and workload, one GPU before many; peers in the order of their measurement."""
    return row["model"], list(WORKLOADS).index(row["workload"]), row["ranks"]


def _bar(value: float | str | None) -> str:
    return in_seconds(value) if isinstance(value, float) else value or ""


def _table(head: list[str], body: list[list[str]]) -> str:
    """Columns that are figures for the most part stand to the right."""
    columns = zip(*body, strict=True) if body else [()] * len(head)
    right = [2 * sum(c[:1].isdigit() for c in cells) > sum(map(bool, cells)) for cells in columns]
    lines = [head, [" ---: " if r else " --- " for r in right], *body]
    return (
        "\n".join(
            "|" + "|".join(c if n == 1 else f" {c} " for c in line) + "|"
            for n, line in enumerate(lines)
        )
        + "\n"
    )
