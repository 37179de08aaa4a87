"""The figures of docs/concepts.md: `python docs/site/figures.py [--check]` draws them to docs/concepts/.

What they show is computed: samples are packed by `mp.pack`, and compared by `mp.compare`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import figures_pack
import figures_trace

FOLDER = Path(__file__).resolve().parents[1] / "concepts"

FIGURES = {
    "trace": figures_trace.trace,
    "spans": figures_trace.spans,
    "parity": figures_trace.parity,
    "replay": figures_trace.replay,
    "visible_until": figures_pack.visible_until,
    "forest": figures_pack.forest,
    "loss_rows": figures_pack.loss_rows,
    "media_once": figures_pack.media_once,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure is stale")
    args = parser.parse_args()
    stale = []
    for name, draw in FIGURES.items():
        path, text = FOLDER / f"{name}.svg", draw()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path))
        if not args.check:
            path.write_text(text, encoding="utf-8")
    if args.check and stale:
        print(f"{', '.join(stale)}: stale. Fix: python docs/site/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
