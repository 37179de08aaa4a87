"""The chain within `mmpack.invariant`: what a layout must not change, bit for bit."""

import pytest
from chain.job import Options, chain
from chain.stages import STAGES, TOWER


@pytest.mark.parametrize(
    "model", [pytest.param("qwen2.5-vl", marks=[pytest.mark.adapter, pytest.mark.slow]), "qwen3-vl"]
)
def test_equal_in_every_layout(model):
    report = chain(Options(model, axes=["batch", "padding", "packed", "shared"], invariant=True))
    assert report.ok, list(report.lines())
    assert set(report.left_out) == {"padding left, own attention", "padding right, own attention"}
    for row in report.rows:
        if row.axis == "alone":  # beside transformers' own attention, outside of the mode
            continue
        if row.direction == "forward" and row.stage != "loss":
            assert row.equal and row.allowed == 0, row
        if row.direction == "backward" and row.axis != "shared" and row.stage not in TOWER:
            assert row.equal and row.allowed == 0, row
    assert {row.stage for row in report.rows} == set(STAGES)


@pytest.mark.slow
def test_without_it_products_drift():
    """The same rows in the plain mode: the drift that the mode takes away."""
    report = chain(Options(axes=["packed"]))
    drifted = [
        r for r in report.rows if r.axis == "packed" and r.direction == "forward" and not r.equal
    ]
    assert report.ok and {"qkv", "logprob"} & {row.stage for row in drifted}
