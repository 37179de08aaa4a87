"""docs/scale.md and benchmarks/scale.md: the table is what results give, sums hold, and switches exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
FIGURES = (ROOT / "benchmarks/scale.md").read_text(encoding="utf-8")


def number(text):
    return float(text.replace(",", ""))


def test_sums_hold():
    text = " ".join((PAGE + FIGURES).split())
    tokens, width, out, back = re.search(
        r"([\d,]+) × ([\d,]+) × 2 bytes = ([\d.]+) MB out, × 4 bytes = ([\d.]+) MB back", text
    ).groups()
    assert number(tokens) == 896**2 / 28**2
    assert number(out) == pytest.approx(number(tokens) * number(width) * 2e-6, rel=1e-3)
    assert number(back) == pytest.approx(number(tokens) * number(width) * 4e-6, rel=2e-3)
    before, after = re.search(r"= ([\d.]+) MB before and .* = ([\d.]+) MB after", text).groups()
    sent = 65_536 / 4 * 128 * 2 * 3 / 4 / 1e6
    assert number(before) == pytest.approx(sent * (28 + 2 * 4), rel=3e-3)
    assert number(after) == pytest.approx(sent * 28, rel=2e-3)
    sums = re.findall(
        r"([\d.,]+) µs × ([\d,]+|10⁹)(?: / ([\d,]+))? = ([\d.]+) (ms|s|min|hours|days)\b", text
    )
    assert len(sums) > 20
    for us, count, of, found, unit in sums:
        one = {"ms": 1e-3, "s": 1, "min": 60, "hours": 3600, "days": 86_400}[unit]
        total = number(us) * (1e9 if count == "10⁹" else number(count)) / number(of or "1") / 1e6
        assert number(found) * one == pytest.approx(total, rel=0.02)


def switches():
    """(package, switch) of each row of the last table."""
    rows = re.findall(r"^\| [^|]*\| (\w+) \| (`[^|]+`) \|$", PAGE, re.MULTILINE)
    return [(package, name) for package, cell in rows for name in re.findall(r"`(\w+)`", cell)]


def sources(package):
    found = importlib.util.find_spec(package)
    [folder] = found.submodule_search_locations
    return Path(folder)


PLACES = {  # where a package of many files keeps its switches
    "torch": ["autograd/graph.py", "distributed/fsdp", "include/c10/cuda/CUDAAllocatorConfig.h"],
    "accelerate": ["utils/dataclasses.py"],
    "trl": ["trainer"],
    "verl": ["trainer/config", "workers/config"],
    "deepspeed": ["runtime"],
    "vllm": ["engine/arg_utils.py"],
    "sglang": ["srt/arg_groups", "srt/server_args.py"],
}


def text_of(package, root):
    for place in PLACES[package]:
        path = root / place
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.yaml")]
        for file in files:
            yield file.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("package", PLACES)
def test_switches_exist(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is in another environment")
    text = "\n".join(text_of(package, sources(package)))
    names = [name for of, name in switches() if of == package]
    assert names and [n for n in names if n not in text] == []
