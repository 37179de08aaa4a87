"""What benchmarks/results/*.json gives: `python benchmarks/render.py [--check]`.

docs/performance.md, a page of each report beside it with its chart first, README's headline with
docs/speed.svg and docs/speed.png, the counts of tests/chain/README.md.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from charts import CHARTS, draw, learn, step
from charts.chain import NO_AXES
from charts.overview import overview
from PIL import Image

from benchmarks.step import page, report

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/performance.md")
OPS = Path("benchmarks/results")  # a page of each op
FROM_DOCS = f"../{OPS}"
SVG, PNG = Path("docs/speed.svg"), Path("docs/speed.png")
README = Path("README.md")
CHAIN = Path("tests/chain/README.md")
RESULTS = Path(__file__).parent / "results"
STEP, LIGER = "step.json", "step_liger.json"
BEGIN, END = "<!-- step: benchmarks/render.py -->\n", "<!-- /step -->\n"
SPLIT = ("tensor_parallel", "sequence_parallel")  # axes with a column of each number of ranks
CHAIN_BEGIN, CHAIN_END = "<!-- chain: benchmarks/render.py -->\n", "<!-- /chain -->\n"

HEAD = """# Performance
"""
SOURCE = "Made by `benchmarks/render.py` from `benchmarks/results/`"
OVERVIEW_HEAD = """## Some cases of these pages
"""
OPS_HEAD = """## Single ops

Each benchmark of a GPU op first compares its values with a reference, and stops if they differ too much.
"""
OVERVIEW = "Each page has its versions, commands and all rows. To measure again, start on a GPU:"
OVERVIEW_RUN = """```sh
make bench PYTHON=python3
python -m benchmarks.step
python benchmarks/host.py  # from here on any machine
python benchmarks/parity_speed.py build/parity
```
"""
OF_GPU = """
Times are medians on the device that is named; compare ratios within one table, since a card's rate moves from day to
day. `copy` is the bandwidth of a large copy on the device, bytes read and written. Kernels for ROCm (gfx942) are
compiled in CI, and not run.
"""
OF_RUNS = """
Seconds are those of one run, the start of its processes included.
"""
OF_HOST = """
Times are of the machine that is named: compare ratios.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is another")
    args = parser.parse_args()
    texts = made(RESULTS, (ROOT / README).read_text(encoding="utf-8"))
    stale = [path for path, text in texts.items() if not _is(ROOT / path, text)]
    stale += [path for path in _written(ROOT) if path not in texts]
    for path in stale:
        if args.check:
            print(
                f"{path} is not what its results give. Fix: python benchmarks/render.py",
                file=sys.stderr,
            )
        elif path in texts:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_bytes(_bytes(texts[path]))
        else:
            (ROOT / path).unlink()
    return int(args.check and bool(stale))


def made(results: Path, readme: str) -> dict[Path, str | bytes]:
    """Content by path: pages, charts as SVG, README's also as PNG."""
    steps = report.read(results / STEP)
    rows = page.whole_runs(steps["rows"])
    ops = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(results.glob("*.json"))
        if file.name not in (STEP, LIGER)
    }
    charts = {name: CHARTS[name](op) for name, op in ops.items()}
    texts: dict[Path, str | bytes] = {
        OPS / f"{name}.md": _op_page(name, op, charts[name]) for name, op in ops.items()
    }
    if rows:
        charts = {"step": step.every(rows)} | charts
        headline = step.headline(rows)
        texts |= {SVG: draw.svg(headline), PNG: draw.png(headline)}
    lines = [line for chart in charts.values() for line in chart.headlines]
    if lines:
        charts["overview"] = overview(lines)
    ran = page.machine(steps, rows[0]["device"]) if rows else ""
    texts |= {OPS / f"{name}.svg": draw.svg(chart) for name, chart in charts.items()}
    texts[OPS / "step.md"] = _step_page(steps, results, charts.get("step"), ran)
    texts[PAGE] = _first_page(charts, rows, ran, ops, steps["rows"])
    lines_of_readme = page.headline(rows, str(SVG), str(PNG), draw.WIDTH, str(PAGE))
    if "learn" in ops:
        lines_of_readme += learn.readme(ops["learn"], f"{OPS}/learn.svg", f"{OPS}/learn.md")
    texts[README] = _between(readme, BEGIN, lines_of_readme, END)
    if "chain" in ops:
        whole = (ROOT / CHAIN).read_text(encoding="utf-8")
        texts[CHAIN] = _between(whole, CHAIN_BEGIN, _chain(ops["chain"]), CHAIN_END)
    return texts


def _between(text: str, begin: str, new: str, end: str) -> str:
    """With what stands between the two lines made new."""
    before, begin, rest = text.partition(begin)
    _, end, after = rest.partition(end)
    return before + begin + new + end + after


def _chain(op: dict[str, Any]) -> str:
    """Counts of each run and its axes, by where it ran."""
    places: dict[str, list[dict[str, Any]]] = {}
    for row in op["rows"]:
        if row["section"] == "runs" and "did_not_run" not in row:
            of = op["versions"] | row
            versions = ", ".join(f"{name} {of[name]}" for name in ("torch", "transformers"))
            where = f"{row.get('device', op['device'])} ({versions})"
            places.setdefault(where, []).append(row | {"axes": _axes(op, row["run"])})
    head = [
        "| run | axes | rows | equal | bounded | beyond |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    line = "| {run} | {axes} | {rows} | {equal} | {bounded} | {beyond} |"
    lines = []
    for where, runs in places.items():
        every = "" if lines else f", with [all differences by stage and axis](../../{OPS}/chain.md)"
        lines += ["", f"On {where}{every}:", "", *head, *(line.format(**run) for run in runs)]
    return "\n".join([*lines, "", ""])


def _axes(op: dict[str, Any], run: str) -> str:
    """What a run compared: its columns, those of several numbers of ranks as one."""
    of_run = (row for row in op["rows"] if row["section"] == run)
    columns = dict.fromkeys(name for row in of_run for name in row if name not in NO_AXES)
    ranks: dict[str, list[str]] = {}
    for column in columns:
        name, _, number = column.rpartition(" ")
        if name in SPLIT:
            ranks.setdefault(name, []).append(number)
        else:
            ranks.setdefault(column, [])
    return ", ".join(f"`{name}`" + f" {', '.join(n)}" * bool(n) for name, n in ranks.items())


def _first_page(
    charts: dict[str, draw.Chart],
    rows: list[dict[str, Any]],
    ran: str,
    ops: dict[str, Any],
    every_row: list[dict[str, Any]],
) -> str:
    parts = [HEAD, f"{SOURCE}.\n", page.section(rows, f"{FROM_DOCS}/step.svg", ran, every_row)]
    if "overview" in charts:
        devices = dict.fromkeys(
            [*(r["device"] for r in rows[:1]), *(d for op in ops.values() for d in _devices(op))]
        )
        said = textwrap.fill(f"Measured on: {'; '.join(devices)}. {OVERVIEW}", 120)
        shown_chart = _shown(charts["overview"], f"{FROM_DOCS}/overview.svg")
        parts += [OVERVIEW_HEAD, shown_chart, said, "", OVERVIEW_RUN]
    parts.append(OPS_HEAD)
    links = [f"[{ops[name]['op']}]({FROM_DOCS}/{name}.md)" for name in ops if name in charts]
    listed = textwrap.fill(", ".join(links), 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*parts, listed]) + "\n"


def _step_page(steps: dict[str, Any], results: Path, chart: draw.Chart | None, ran: str) -> str:
    shown = ""
    if chart is not None:
        shown = "\n".join([_shown(chart, "step.svg"), ran, page.RUN])
    beside = page.liger_rows(report.read(results / LIGER))
    return "\n".join([page.all_rows(steps, shown), *[beside] * bool(beside)])


def _op_page(name: str, op: dict[str, Any], chart: draw.Chart) -> str:
    head = f"# Performance: {op['op']}\n"
    note = OF_RUNS if op["op"] == "chain" else OF_GPU if op["floors"] else OF_HOST
    source = f"{SOURCE}; the whole step is in [performance](../../docs/performance.md).{note}"
    return "\n".join([head, _shown(chart, f"{name}.svg"), _ran(op), source, _tables(op)])


def _shown(chart: draw.Chart, path: str) -> str:
    return f"![{chart.title}]({path})\n\n{textwrap.fill(chart.note, 120)}\n"


def _is(path: Path, text: str | bytes) -> bool:
    """The same bytes; of a PNG the same pixels, since zlib compresses otherwise on another CPU."""
    if not path.exists() or path.suffix != ".png":
        return path.exists() and path.read_bytes() == _bytes(text)
    there, here = (
        np.asarray(Image.open(io.BytesIO(data)), dtype=int)
        for data in (path.read_bytes(), _bytes(text))
    )
    return there.shape == here.shape and int(abs(there - here).max()) <= 2


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _written(root: Path) -> list[Path]:
    """What earlier runs made."""
    found = [
        *(root / OPS).glob("*.md"),
        *(root / OPS).glob("*.svg"),
        *(path for path in (root / SVG, root / PNG) if path.exists()),
    ]
    return [path.relative_to(root) for path in sorted(found)]


def _ran(op: dict[str, Any]) -> str:
    """Hardware, versions, floors of the run, command."""
    versions = ", ".join(f"{name} {version}" for name, version in op["versions"].items())
    floors = ", ".join(_floor(name, value) for name, value in op["floors"].items())
    said = f"{', '.join(_devices(op))}, {versions}." + (
        f" Floors of the run: {floors}." if floors else ""
    )
    return "\n".join([said, "", "```", *(op.get("commands") or [op["command"]]), "```", ""])


def _devices(op: dict[str, Any]) -> list[str]:
    """Of the last run, and of earlier ones that the file kept: these name their own."""
    return list(dict.fromkeys([op["device"], *(r["device"] for r in op["rows"] if "device" in r)]))


def _tables(op: dict[str, Any]) -> str:
    lines: list[str] = []
    rows = [row for row in op["rows"] if "did_not_run" not in row]
    sections = list(dict.fromkeys(row.get("section") for row in rows))
    for section in sections:
        lines += [f"## {section}", ""] if section else []
        own = [row for row in rows if row.get("section") == section]
        lines += [*_table([{k: v for k, v in row.items() if k != "section"} for row in own]), ""]
    for row in op["rows"]:
        if "did_not_run" in row:
            name = row.get("name") or row["section"]
            lines.append(f"{name} did not run: {_cell('', row['did_not_run'])}\n")
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name) for row in rows] for name in names}
    same = {n for n in names if len(rows) > 1 and all(v == values[n][0] for v in values[n])}
    if same:
        of_all = (f"{_name(n)} {_cell(n, values[n][0])}" for n in names if n in same)
        lines += [f"Of all rows: {', '.join(of_all)}.", ""]
    # What few rows have is in the JSON alone.
    names = [
        n for n in names if n not in same and sum(v is not None for v in values[n]) * 4 > len(rows)
    ]
    lines += [f"| {' | '.join(map(_name, names))} |", "| --- " * len(names) + "|"]
    lines += [f"| {' | '.join(_cell(name, row.get(name)) for name in names)} |" for row in rows]
    return lines


def _name(column: str) -> str:
    return column.replace("_", " ")


def _floor(name: str, value: float) -> str:
    if name == "copy_bytes_per_second":
        return f"copy {value / 1e12:.2f} TB/s"
    return f"{_name(name)} {value:.4g}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("bytes"):
        return f"{value / 1e9:.3f} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"
    if name.endswith("flops") and value:
        return f"{value / 1e12:.3g} T"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_cell('', v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
