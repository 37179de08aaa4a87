"""Charts of what a step consists of: their bars are the rows' figures, and a miss is shown as one."""

import sys

import pytest
from support.benchmarks import benchmark

RENDER = benchmark("render")
FIRST_STEP = benchmark("first_step")
CHARTS, draw = sys.modules["charts"].CHARTS, sys.modules["charts.draw"]


def bars(chart):
    """(value, kind) of each bar, by its group and label."""
    draw.svg(chart)  # as the page draws it
    return {
        (group.title, bar.label): (bar.value, bar.kind)
        for panel in chart.panels
        for group in panel.groups
        for bar in group.bars
    }


def tower_row(backend, ms, chosen=False):
    names = {"shape": "windows", "backend": backend, "chosen": chosen}
    return names | {"forward_backward_ms": ms}


@pytest.mark.parametrize(("other", "kind"), [(0.6, "own"), (0.4, "missed")])
def test_a_tower_s_backend_that_was_not_the_best_is_missed(other, kind):
    rows = [tower_row("one by one", 9.0), tower_row("varlen", 0.5, True), tower_row("sdpa", other)]
    chart = CHARTS["tower_attention"]({"rows": rows})
    found = bars(chart)
    assert found["windows", "varlen, chosen"] == (0.5, kind)
    assert found["windows", "transformers, one by one"] == (9.0, "peer")
    assert chart.headlines[0].faster == 18.0


def loader_rows(exposed):
    rows = []
    for kind in ("float32", "uint8"):
        for who, ms in (("by hand", 400.0), ("PackLoader", exposed)):
            row = {"section": "a loop", "case": kind, "who": who}
            rows.append(row | {"ms": 3600 + ms, "exposed_ms": ms})
        rows[-1] |= {"hidden": 0.5, "hidden_after_first": 0.94}
        for memory, ms in (("pageable", 44.0), ("pinned", 5.0)):
            rows.append({"case": kind, "who": f"to the device, {memory}", "ms": ms})
    return rows


@pytest.mark.parametrize(("exposed", "kind"), [(80.0, "own"), (500.0, "missed")])
def test_a_loader_that_hides_nothing_is_missed(exposed, kind):
    chart = CHARTS["loader"]({"rows": loader_rows(exposed)})
    waits, copies = chart.panels
    assert [(b.value, b.kind) for g in waits.groups for b in g.bars] == [
        (400.0, "peer"),
        (exposed, kind),
    ] * 2
    assert [b.value for b in copies.groups[0].bars] == [44.0, 5.0]
    assert chart.headlines[0].faster == 400.0 / exposed and draw.svg(chart)
