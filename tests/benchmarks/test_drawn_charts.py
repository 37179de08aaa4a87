"""Charts of docs/performance: bars as long as their figures, text that can be read, by day and by night."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.benchmarks import benchmark

RENDER = benchmark("render")
draw = sys.modules["charts.draw"]
pick = sys.modules["charts.pick"]
SVG = "{http://www.w3.org/2000/svg}"
RESULTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(RENDER.RESULTS.glob("*.json"))
    if path.name not in (RENDER.STEP, RENDER.LIGER)
}


def a_chart(**more):
    bars = [draw.Bar("peer", 8.0, "8 s"), draw.Bar("mmpack", 2.0, "2 s <&", "own", 1.0)]
    return draw.Chart(
        "How <long>?", [draw.Panel("seconds", [draw.Group("work", bars)], **more)], ""
    )


def colours(svg, part="fill"):
    """Width of each path of a colour, by colour."""
    out = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        found = re.search(rf"{part}: (#\w+)", path.get("style", ""))
        if found:
            xs = [float(x) for x in re.findall(r"[ML] (-?[\d.]+)", path.get("d"))]
            out.setdefault(found[1], []).append((min(xs), max(xs)))
    return out


def test_bars_are_as_long_as_their_figures():
    found = colours(draw.svg(a_chart()))
    [own], [peer] = (found[draw.COLOURS[kind][0]] for kind in ("own", "peer"))
    assert own[0] == peer[0]
    assert (peer[1] - peer[0]) / (own[1] - own[0]) == pytest.approx(4.0, abs=0.02)


def test_ratios_begin_at_one_and_go_as_their_logarithms():
    bars = [
        draw.Bar("a", 100.0, "", "own"),
        draw.Bar("b", 10.0, "", "peer"),
        draw.Bar("c", 0.1, ""),
    ]
    panel = draw.Panel("times", [draw.Group("", bars)], log=True, ratios=True, mark=(1, "as fast"))
    found = colours(draw.svg(draw.Chart("?", [panel], "")))
    [own], peers = (found[draw.COLOURS[kind][0]] for kind in ("own", "peer"))
    ten, tenth = sorted(peers, key=lambda ends: -ends[1])
    assert own[0] == ten[0] == tenth[1]
    assert own[1] - own[0] == pytest.approx(2 * (ten[1] - ten[0]), abs=0.01)
    assert tenth[1] - tenth[0] == pytest.approx(ten[1] - ten[0], abs=0.01)


def test_where_a_peer_is_better_ours_is_missed():
    def kinds(*bars, higher=False):
        return [bar.kind for bar in draw.judged(draw.Group("", list(bars)), higher).bars]

    own, other = draw.Bar("a", 2.0, "", "own"), draw.Bar("b", 3.0, "", "own, another way")
    peer, beside = draw.Bar("c", 1.0, ""), draw.Bar("d", 0.5, "", "beside")
    assert kinds(own, other, peer) == ["missed", "own, another way", "peer"]
    assert kinds(own, other, peer, higher=True) == ["own", "own, another way", "peer"]
    assert kinds(own, beside) == ["own", "beside"]
    assert kinds(own, draw.Bar("e", None, "out of memory")) == ["own", "peer"]


def test_misses_are_drawn_as_missed():
    """Rows of the reports themselves, read here by hand."""
    for name, missed in {
        "teachers": lambda r: r["both_ms"] > min(r["logits_ms"], r["chunked_ms"]),
        "host": lambda r: (
            r["x_faster"] < max(r["floor"], r.get("aim_x", 0)) or r["ms"] > r.get("aim_ms", 1e9)
        ),
    }.items():
        bars = draw._bars(RENDER.CHARTS[name](RESULTS[name]).panels)
        rows = [row for row in RESULTS[name]["rows"] if "did_not_run" not in row]
        assert sum(bar.kind == "missed" for bar in bars) == sum(map(missed, rows))


def test_stale_and_forgotten_files_are_named(tmp_path, monkeypatch, capsys):
    docs = tmp_path / "benchmarks" / "results"
    docs.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- step: benchmarks/render.py -->\n<!-- /step -->\n")
    (docs / "gone.svg").touch()
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(RENDER, "ROOT", tmp_path)
    monkeypatch.setattr(RENDER, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert RENDER.main() == 1
    said = capsys.readouterr().err
    assert "benchmarks/results/gone.svg is not what" in said and "docs/performance.md" in said
    monkeypatch.setattr("sys.argv", ["render.py"])
    assert RENDER.main() == 0 and not (docs / "gone.svg").exists()
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert RENDER.main() == 0 and Path(tmp_path / "docs/performance.md").exists()


def test_png_of_other_pixels_is_another(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(draw.png(a_chart()))
    assert RENDER._is(file, draw.png(a_chart()))
    assert not RENDER._is(file, draw.png(a_chart(tick="a floor")))
    other = draw.Chart("How short?", a_chart().panels, "")
    assert not RENDER._is(file, draw.png(other))
