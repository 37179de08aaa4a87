"""The page in a real browser: its style applies, nothing runs, nothing sticks out, wide and narrow, light and dark."""

import re

import pytest
from support import browser
from support.browser import BROWSER, MISSING
from support.planting.episodes import decode
from test_html import PICTURES, evil_pair, pair

from mmpack import compare

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)
SCRIPT = """
return { evil: String(w.evil), sheets: d.styleSheets.length, overflow: root.scrollWidth - root.clientWidth,
  background: w.getComputedStyle(d.body).backgroundColor, strips: all(".mm-strip").length,
  pictures: all("svg image").length, rules: d.styleSheets[0]?.cssRules.length,
  high: Math.min(...all(".mm-strip").map(e => e.getBoundingClientRect().height)) };
"""


def measured(tmp_path, html, width=1100, dark=False):
    return browser.measured(tmp_path, html, SCRIPT, width, dark)


def report():
    left, right = [], []
    for cause in ("max_pixels", "position_rule", "dropped_image", "retokenized_response"):
        for side, samples in zip((left, right), pair(cause), strict=True):
            samples[0].sample_id = cause
            side += samples
    return compare(left, right)


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1100, False)])
def test_it_fits_and_is_styled(tmp_path, width, dark):
    html = report().to_html(media_root=PICTURES, decode=decode)
    seen = measured(tmp_path, html, width, dark)
    assert seen["overflow"] <= 0
    assert seen["rules"] > 40 and seen["strips"] == 4 and seen["pictures"] == 4
    assert seen["high"] > 30
    light = sum(map(int, re.findall(r"\d+", seen["background"])[:3])) > 3 * 128
    assert light != dark


def test_nothing_of_a_trace_runs(tmp_path):
    html = compare(*evil_pair()).to_html(decode=lambda ids: "<script>evil=1</script>")
    assert measured(tmp_path, html)["evil"] == "undefined"


def test_the_policy_stops_what_escaping_would_let_through(tmp_path):
    script = "<script>evil=1</script>"
    html = report().to_html().replace("<h1", f"{script}<h1", 1)
    assert measured(tmp_path, html)["evil"] == "undefined"
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert measured(tmp_path, free)["evil"] == "1"  # the measurement sees a script that runs
