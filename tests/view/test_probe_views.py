"""Pages and figures of the probe: what is drawn follows from the report."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.probe_sides import layers, samples

import mmpack as mp
from mmpack.view.probe.lines import points, scale_of


@pytest.fixture(scope="module")
def reports():
    off = mp.probe.run(layers(), layers(lambda k, n, x: x * 1.001 if k == 2 else x), samples())
    on = mp.probe.run(layers(), layers(), samples())
    return off, on


def test_the_page_says_what_parts(reports):
    parted, alike = reports
    parted.command = "mmpack probe '<a>' b"
    page = parted.to_html()
    assert page.startswith("<!doctype html>") and "Parted" in page
    assert "layers.2&lt;out" in page and "mmpack probe &#39;&lt;a&gt;&#39; b" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert page.count("<mark>") >= 3 and "Alike" in alike.to_html()
    assert "layers.2" in parted._repr_html_()


def test_the_page_draws_every_module_of_every_report(reports):
    page = mp.probe.chart and reports[0].to_html(others=[reports[1]])
    lines = re.findall(r'<polyline points="([^"]*)" class="mm-line(\d)"', page)
    assert [len(p.split()) for p, _ in lines] == [5, 5]
    heights = [float(p.split(",")[1]) for p in lines[0][0].split()]
    assert heights[3] < heights[2]  # layer 2 parts: higher on the page than layer 1 …
    assert page.count("<circle") == 1  # … and only the parted one has a ring


def test_the_figure_is_a_png_that_shows_the_parting(reports, tmp_path):
    made = mp.probe.chart(reports, labels=["off", "on"])
    picture = Image.open(io.BytesIO(made))
    assert picture.size[0] == 2160
    one = mp.probe.chart(reports[1])
    assert made != one
    path = tmp_path / "a.png"
    reports[0].to_png(path)
    assert Image.open(path).size[0] == 2160


def test_the_scale_holds_all_errors(reports):
    scale = scale_of(reports)
    assert scale.stages == [f"{n}<out" for n in ("embed", *(f"layers.{k}" for k in range(4)))]
    assert scale.low < -6 and scale.high >= -2
    assert [name for _, name in scale.layers()] == ["0", "1", "2", "3"] or scale.layers() == []
    assert scale.y(0.0) == 0 and scale.y(float("inf")) == 1


@pytest.mark.parametrize("wrong", [[], [3], 3])
def test_other_things_are_refused(wrong, reports, tmp_path):
    with pytest.raises((mp.ArgumentError, TypeError)):
        mp.probe.chart(wrong)
    with pytest.raises(mp.ArgumentError, match="label"):
        mp.probe.chart(reports, labels=["one"])
    with pytest.raises(mp.ArgumentError, match="png"):
        mp.probe.chart(reports, tmp_path / "a.jpg")


def test_reports_draw_themselves_however_the_room_was_loaded(tmp_path):
    path = tmp_path / "a.png"
    code = (
        "import mmpack as mp\n"
        "from mmpack.probe import run\n"
        "from support.probe_sides import layers, samples\n"
        "report = run(layers(), layers(), samples())\n"
        f"report.to_png({str(path)!r})\n"
        "assert report.to_html(others=report) and report._repr_html_() and mp.probe.chart(report)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_lines_never_go_back(reports):
    first, other = reports
    moved = replace(other, modules=[other.modules[-1], *other.modules[:-1]])
    scale = scale_of([first, moved])
    for report in (first, moved):
        for line in points(report, scale):
            places = [x for x, _ in line]
            assert places == sorted(places) and len(places) == len(report.modules)
