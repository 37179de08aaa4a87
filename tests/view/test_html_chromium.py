"""The page of a report in a real browser: nothing of a trace runs. How it fits: test_page_kinds."""

import re

import pytest
from support.browser import BROWSER, MISSING, measured
from test_html import evil_pair

from mmpack import compare

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)
EVIL = "return String(w.evil)"


def test_nothing_of_a_trace_runs(tmp_path):
    html = compare(*evil_pair()).to_html(decode=lambda ids: "<script>evil=1</script>")
    assert measured(tmp_path, html, EVIL) == "undefined"


def test_the_policy_stops_what_escaping_would_let_through(tmp_path):
    script = "<script>evil=1</script>"
    html = compare(*evil_pair()).to_html().replace("<h1", f"{script}<h1", 1)
    assert measured(tmp_path, html, EVIL) == "undefined"
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert measured(tmp_path, free, EVIL) == "1"  # the measurement sees a script that runs
