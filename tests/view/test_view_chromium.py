"""The page of a trace in a real browser: wide and narrow, light and dark, by keyboard, and nothing of a trace runs."""

import re

import pytest
from support.browser import BROWSER, MISSING, measured
from support.gui import FOLDER, words
from support.gui import samples as gui_samples
from support.samples import make_sample
from test_html import evil_pair
from test_view_page import EVIL

import mmpack as mp

RAN = "return String(w.evil)"
pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)


@pytest.fixture(scope="module")
def html():
    return mp.view.html(gui_samples(), media_root=FOLDER, tokenizer=words)


def test_the_arrow_keys_walk_through_rows_and_tokens(tmp_path, html):
    """Every token of the first sample, by key: its index, its id and its text are those of the trace."""
    walked = measured(
        tmp_path,
        html,
        """
        const article = d.getElementById("s0"), seen = [];
        article.focus();
        press("ArrowDown");
        for (let row = d.activeElement; row.closest("article") === article; row = d.activeElement) {
          press("Home");
          for (let last = null; last !== d.getElementById("now").textContent;) {
            last = d.getElementById("now").textContent;
            seen.push([...d.getElementById("now").children].map(e => e.textContent));
            press("ArrowRight");
          }
          press("ArrowDown");
          if (d.activeElement === row) break;
        }
        return seen;
        """,
    )
    sample = gui_samples()[0]
    at = 0
    for token, id_, *rest in walked:
        first = int(re.findall(r"\d+", token)[0])
        assert first == at and id_ == f"id {sample.input_ids[at]}"
        at = int(re.findall(r"\d+", token)[-1]) + 1
        if "–" not in token:
            text = words(int(sample.input_ids[first]))
            if text.isascii():
                assert rest[0] == f"“{text.decode().replace(chr(10), '↵' + chr(10))}”"
    assert at == len(sample)
    loss = [rest for token, _, *rest in walked if any(", loss" in part for part in rest)]
    assert len(loss) == sample.num_loss_tokens
    shown = [float(p.split()[1]) for rest in loss for p in rest if p.startswith("logprob")]
    assert shown == pytest.approx(sample.rollout_logprobs.tolist(), abs=0.0051)
    (region,) = sample.region_spans
    scored = sum("reward iou +0.86 (region 0)" in part for rest in walked for part in rest)
    assert scored == region.stop - region.start
    of_turn = sum("reward format +1 (turn 0)" in part for rest in walked for part in rest)
    assert of_turn == sample.num_loss_tokens


def test_keys_for_samples_and_screens(tmp_path, html):
    seen = measured(
        tmp_path,
        html,
        """
        const at = () => d.activeElement.id || d.activeElement.className;
        const out = {};
        press("n"); out.first = at();
        press("n"); out.second = at();
        press("p"); out.back = at();
        const figure = d.getElementById("s0m0"), wide = () => figure.querySelector("svg").getBoundingClientRect().width;
        figure.focus(); const small = wide();
        press("Enter"); out.larger = wide() > small;
        press("Escape"); out.again = wide() === small;
        all(".row")[0].focus(); out.bar = !d.getElementById("now").hidden;
        out.outline = w.getComputedStyle(all(".txt .on")[0]).outlineStyle;
        figure.focus(); out.gone = d.getElementById("now").hidden;
        out.reached = all("[tabindex='0'], a[href], summary").length;
        out.unnamed = all(".row, figure svg, nav").filter(e => !e.getAttribute("aria-label")).length;
        return out;
        """,
    )
    assert (seen["first"], seen["second"], seen["back"]) == ("s0", "s1", "s0")
    assert seen["larger"] and seen["again"] and seen["bar"] and seen["gone"]
    assert seen["outline"] == "solid" and seen["unnamed"] == 0 and seen["reached"] > 30


def test_a_token_in_the_folded_part_opens_it(tmp_path):
    sample = make_sample([("text", list(range(1, 400))), ("response", [7], 0)])
    seen = measured(
        tmp_path,
        mp.view.html([sample]),
        """
        all(".row")[0].focus();
        const before = all(".more")[0].open;
        press("End");
        return [before, all(".more")[0].open, d.getElementById("now").textContent];
        """,
    )
    assert seen[:2] == [False, True] and seen[2].startswith("token 398id 399")


def test_marks_lie_where_they_should(tmp_path, html):
    """The click of the first turn and the box of the retry, in fractions of their pictures."""
    seen = measured(
        tmp_path,
        html,
        """
        const of = (figure, what) => { const svg = d.querySelector(figure + " svg").getBoundingClientRect();
          const e = d.querySelector(figure + " " + what).getBoundingClientRect();
          return [(e.left - svg.left) / svg.width, (e.top - svg.top) / svg.height,
            (e.right - svg.left) / svg.width, (e.bottom - svg.top) / svg.height]; };
        return {click: of("#s0m0", ".action circle.line"), box: of("#s2m1", ".region rect.line")};
        """,
    )
    left, top, right, bottom = seen["click"]
    assert ((left + right) / 2, (top + bottom) / 2) == pytest.approx(
        (230 / 560, 38 / 364), abs=0.01
    )
    expected = (88 / 560, 80 / 364, 536 / 560, 128 / 364)
    assert seen["box"] == pytest.approx(expected, abs=0.01)


def test_nothing_of_a_trace_runs(tmp_path):
    sample = gui_samples()[0]
    sample.sample_id = sample.media[0].media_id = sample.region_spans[0].label = EVIL
    sample.metadata = {EVIL: EVIL, "token_texts": [EVIL] * len(sample)}
    html = mp.view.html([sample], title=EVIL)
    walk = """
        all(".row").forEach(row => { row.focus(); press("End"); });
        return [String(w.evil), all("img").length, all("script").length];
        """
    assert measured(tmp_path, html, walk) == ["undefined", 0, 1]


def test_nothing_of_a_report_runs(tmp_path):
    html = mp.compare(*evil_pair()).to_html(decode=lambda ids: "<script>evil=1</script>")
    assert measured(tmp_path, html, RAN) == "undefined"


def test_the_policy_stops_what_escaping_would_let_through(tmp_path):
    script = "<script>evil=1</script>"
    html = mp.compare(*evil_pair()).to_html().replace("<h1", f"{script}<h1", 1)
    assert measured(tmp_path, html, RAN) == "undefined"
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert measured(tmp_path, free, RAN) == "1"  # the measurement sees a script that runs
