"""Every kind of page in a real browser: it fits, narrow and wide, in both themes; keys reach what scrolls; contrast."""

from itertools import pairwise

import pytest
from support import drawn
from support.browser import BROWSER, MISSING, measured_each
from support.contrast import CONTRAST, REACHED

import mmpack as mp
from mmpack.view.pages import page
from mmpack.view.parity.parts import report_parts

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)
KINDS = ("trace", "pack", "padded", "plan", "report", "saved", "cards")


@pytest.fixture(scope="module")
def pages():
    samples, batch, plan, report = (
        drawn.answers(),
        drawn.packed(),
        drawn.planned(),
        drawn.reported(),
    )
    saved = mp.ParityReport(**{**vars(report), "pairs": []})
    cards = [x._repr_html_() for x in (samples[0], batch, plan, report)]
    made = (
        mp.view.html(samples),
        mp.view.html(batch),
        mp.view.html(mp.pad(samples)),
        mp.view.html(plan),
        mp.view.html(report),
        page("saved", report_parts(saved, note="A note.")),
        f"<!doctype html><body><main>{''.join(cards)}</main>",
    )
    return dict(zip(KINDS, made, strict=True))


@pytest.fixture(scope="module", params=[(1100, False), (360, True)], ids=["wide", "narrow-dark"])
def seen(request, pages, tmp_path_factory):
    width, dark = request.param
    script = f"return {{reached: (() => {{{REACHED}}})(), contrast: (() => {{{CONTRAST}}})()}};"
    found = measured_each(tmp_path_factory.mktemp("pages"), pages, script, width, dark)
    return {"width": width, "dark": dark, **found}


@pytest.mark.parametrize("kind", KINDS)
def test_it_fits_and_keys_reach_what_scrolls(seen, kind):
    found = seen[kind]["reached"]
    assert found["overflow"] <= 0
    assert found["unreached"] == [] and found["unnamed"] == []
    assert found["drawings"] or kind == "saved"
    if seen["width"] == 360 and kind != "trace":
        assert found["scrolls"]  # wide drawings and tables are there to be measured
    if kind != "cards":
        assert found["light"] != seen["dark"]
        assert found["levels"][0] == 1
        assert all(b - a <= 1 for a, b in pairwise(found["levels"]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_contrast(seen, kind):
    worst = seen[kind]["contrast"]
    assert worst["count"] > 10 and worst["ratio"] >= 4.5, worst
    assert worst["words"] > 3 or kind == "saved"


def test_words_over_bars_are_measured(pages, tmp_path):
    """Bars of full colour, as they were before: their counts were too faint on a dark page."""
    policy = '<meta http-equiv="Content-Security-Policy"'
    full = pages["plan"].replace(".mm-under{opacity:.6}", "").replace(policy, "<meta name=none")
    assert measured_each(tmp_path, {"plan": full}, CONTRAST, dark=True)["plan"]["ratio"] < 4.5
