"""What benchmarks/results/*.json gives: `python benchmarks/render.py [--check]`.

docs/performance.md with its chart (docs/speed.svg, docs/speed.png), pages of raw figures in docs/performance/, README's
headline.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.bench import chart, page, report

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/performance.md")
OPS = Path("docs/performance")  # a page of each op
SVG, PNG = Path("docs/speed.svg"), Path("docs/speed.png")
README = Path("README.md")
RESULTS = Path(__file__).parent / "results"
STEP, LIGER = "step.json", "step_liger.json"
BEGIN, END = "<!-- step: benchmarks/render.py -->\n", "<!-- /step -->\n"

HEAD = """# Performance

Made by `benchmarks/render.py` from `benchmarks/results/`.
"""
OPS_HEAD = """## Single ops

Each benchmark first holds its op to the numerical contract and stops where it fails.
"""
OP_HEAD = """# Performance: {op}

Made by `benchmarks/render.py` from `benchmarks/results/`; the whole step is in [performance](../performance.md).
Times are medians on the device that is named; compare ratios within one table, since a card's rate moves from day to
day. `copy` is the bandwidth of a large copy on the device, bytes read and written. Kernels for ROCm (gfx942) are
compiled in CI, and not run.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is another")
    args = parser.parse_args()
    texts, picture = made(RESULTS, (ROOT / README).read_text(encoding="utf-8"))
    stale = [path for path, text in texts.items() if not _is(ROOT / path, text)]
    stale += [p for p in (*_op_pages(ROOT), SVG) if p not in texts and (ROOT / p).exists()]
    if not _shows(ROOT / PNG, picture):
        stale.append(PNG)
    if args.check:
        for path in stale:
            print(
                f"{path} is not what its results give. Fix: python benchmarks/render.py",
                file=sys.stderr,
            )
        return int(bool(stale))
    for path in stale:
        (ROOT / path).parent.mkdir(exist_ok=True)
        if path in texts:
            (ROOT / path).write_text(texts[path], encoding="utf-8")
        elif path != PNG or picture is None:
            (ROOT / path).unlink()
        else:
            picture.save(ROOT / PNG, optimize=True)
    return 0


def made(results: Path, readme: str) -> tuple[dict[Path, str], Any]:
    """Text by path, and the chart as a picture; None where no step was measured."""
    texts, links = {}, []
    for file in sorted(results.glob("*.json")):
        if file.name not in (STEP, LIGER):
            op = json.loads(file.read_text(encoding="utf-8"))
            texts[OPS / f"{file.stem}.md"] = "\n".join([OP_HEAD.format(op=op["op"]), _section(op)])
            links.append(f"- [{op['op']}](performance/{file.stem}.md)")
    steps = report.read(results / STEP)
    rows = page.whole_runs(steps["rows"])
    beside = page.liger_rows(report.read(results / LIGER))
    texts[OPS / "step.md"] = "\n".join(
        [page.all_rows(steps), beside] if beside else [page.all_rows(steps)]
    )
    texts[PAGE] = "\n".join([HEAD, page.section(rows, SVG.name, PNG.name), OPS_HEAD, *links]) + "\n"
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    texts[README] = before + begin + page.headline(rows, str(SVG), str(PAGE)) + end + after
    if not rows:
        return texts, None
    drawn = chart.draw(rows, page.title_of(rows))
    texts[SVG] = chart.svg(drawn)
    return texts, chart.png(drawn)


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _shows(path: Path, picture: Any) -> bool:
    """Whether the file has these pixels: how they are compressed is of no interest."""
    if picture is None or not path.exists():
        return picture is None and not path.exists()
    from PIL import Image

    with Image.open(path) as held:
        return held.size == picture.size and np.array_equal(
            np.asarray(held.convert("RGB")), np.asarray(picture)
        )


def _op_pages(root: Path) -> list[Path]:
    return [page.relative_to(root) for page in sorted((root / OPS).glob("*.md"))]


def _section(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    floors = ", ".join(_floor(name, value) for name, value in report["floors"].items())
    lines = [
        f"{report['device']}, {versions}." + (f" Floors of the run: {floors}." if floors else ""),
    ]
    lines += ["", "```", *(report.get("commands") or [report["command"]]), "```", ""]
    rows = [row for row in report["rows"] if "did_not_run" not in row]
    sections = list(dict.fromkeys(row.get("section") for row in rows))
    for section in sections:
        lines += [f"## {section}", ""] if section else []
        own = [row for row in rows if row.get("section") == section]
        lines += [*_table([{k: v for k, v in row.items() if k != "section"} for row in own]), ""]
    for row in report["rows"]:
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
