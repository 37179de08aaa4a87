"""docs/scale.md and benchmarks/scale.md: sums hold."""

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
