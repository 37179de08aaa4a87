"""What can't be drawn, and options of another kind: each refused in one line that names it."""

import numpy as np
import pytest
from support import drawn
from support.gui import samples
from support.probe_sides import layers
from support.probe_sides import samples as probed

import mmpack as mp
from mmpack.parity.drift_traces import trace_drift
from mmpack.view import drift_png, html, png

OTHER = "is no option for"
CALLS = [
    (lambda: html(5), "expected samples, a batch, a ParityReport or a Plan"),
    (lambda: html([1]), "samples[0] is of type int"),
    (lambda: html(samples(), decode=str), f"decode {OTHER} samples"),
    (lambda: html(samples(), limit=0), "limit is 0"),
    (lambda: html(samples(), title=3), "title is of type int"),
    (lambda: html(samples(), media_root="no/such"), "is no folder"),
    (lambda: png(drawn.packed(), "x.png"), "Fix: call Path('x.png').write_bytes(mp.view.png("),
    (lambda: html(samples(), "x.HTML"), "Fix: call Path('x.HTML').write_text(mp.view.html("),
    (lambda: html(samples(), pictures=[1]), "pictures is of type list"),
    (lambda: html(samples(), pictures={"a": np.zeros((2, 2, 3))}), "expected uint8"),
    (lambda: html(samples(), tokenizer="qwen"), "tokenizer is of type str"),
    (lambda: html(samples(), drift=drift()), f"drift {OTHER} samples"),
    (lambda: html(mp.compare([], []), limit=3), f"limit {OTHER} a report"),
    (lambda: html(mp.compare([], []), drift={"tokens": 3}), "drift is of type dict"),
    (lambda: html(drawn.packed(), limit=3), f"limit {OTHER} a batch"),
    (lambda: html(drawn.planned(), limit=3), f"limit {OTHER} a plan"),
    (lambda: png(drawn.planned(), limit=3), f"view.png: limit {OTHER}"),
    (lambda: png(drawn.planned(), title=3), "title is of type int"),
    (lambda: png(drawn.packed(), tokenizer=ord), f"view.png: tokenizer {OTHER}"),
    (lambda: png(drawn.reported(), title="a"), f"view.png: title {OTHER}"),
    (lambda: png(samples(), drift=3), f"view.png: drift {OTHER}"),
    (lambda: drift_png(None), "drift"),
    (lambda: drift_png([1.0]), "drift is of type list"),
    (lambda: drift_png(drift(), title=3), "title is of type int"),
    (lambda: probe().to_png(labels=["one", "two"]), "1 reports, labels"),
    (lambda: probe().to_png("a.jpg"), "ending in .png"),
    (lambda: probe().to_png(5), "ending in .png"),
    (lambda: probe().to_png(others=[None]), "what to draw is None"),
    (lambda: probe().to_html(others=5), "what to draw is of type int"),
]


def drift():
    return trace_drift(*drawn.sides())[0]


def probe():
    report = mp.probe.run(layers(), layers(), probed())
    assert report.to_html(others=report)  # one, or several
    return report


@pytest.mark.parametrize(("call", "part"), CALLS, ids=[part for _, part in CALLS])
def test_what_is_wrong_is_named(call, part):
    with pytest.raises(mp.ArgumentError) as error:
        call()
    assert part in str(error.value) and "Fix: " in str(error.value)
    assert "\n" not in str(error.value)
