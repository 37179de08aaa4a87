"""`PYTHONPATH=tests python -m chain`: a step of one model in every layout, stage by stage, forward and backward."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from chain.layouts import DTYPES, FAMILIES, SIZES, prepare

from mmpack._version import __version__


def main(args: Sequence[str] | None = None) -> int:
    """Print what is beyond its bound, and write all rows to `--out`; exit with 1 if any is."""
    parser = argparse.ArgumentParser(prog="chain")
    parser.add_argument("--model", choices=FAMILIES, default="qwen2.5-vl")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="layer: widths of 7B and 8B")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--invariant", action="store_true", help="within mmpack.invariant")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    options = vars(parser.parse_args(args))
    out = options.pop("out")
    rows = prepare(**options).every_row()
    beyond = [row for row in rows if not row.within]
    for row in beyond:
        where = f"{row.axis} {row.value}: {row.kind or row.stage} {row.direction} ({row.place})"
        print(f"BEYOND {where}: {row.error:.1e}, of {row.allowed:.1e}")
    print(f"{len(rows)} rows, {sum(row.equal for row in rows)} equal, {len(beyond)} beyond")
    if out is not None:
        device = torch.cuda.get_device_name() if options["device"] == "cuda" else "cpu"
        setting = options | {
            "device": device,
            "mmpack": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        out.write_text(json.dumps({"setting": setting, "rows": [asdict(row) for row in rows]}))
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
