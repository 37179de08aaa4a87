"""Pages and figures of the probe: what is drawn follows from the report."""

import io
import re
from dataclasses import replace

import pytest
from PIL import Image
from support.probe_sides import layers, samples

import mmpack as mp
from mmpack.view.parts import Curve
from mmpack.view.probe import HIGH, TOP, chart_parts, scale_of


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
    page = reports[0].to_html(others=[reports[1]])
    lines = re.findall(r'<polyline points="([^"]*)" class="mm-line(\d)"', page)
    assert [len(p.split()) for p, _ in lines] == [5, 5]
    heights = [float(p.split(",")[1]) for p in lines[0][0].split()]
    assert heights[3] < heights[2]  # layer 2 parts: higher on the page than layer 1 …
    assert page.count("<circle") == 1  # … and only the parted one has a ring


def test_the_figure_is_a_png_that_shows_the_parting(reports, tmp_path):
    made = reports[0].to_png(others=[reports[1]], labels=["off", "on"])
    picture = Image.open(io.BytesIO(made))
    assert picture.size[0] == 2160
    one = reports[1].to_png()
    assert made != one
    path = tmp_path / "a.png"
    reports[0].to_png(path)
    assert Image.open(path).size[0] == 2160


def test_the_scale_holds_all_errors(reports):
    scale = scale_of(reports)
    assert scale.stages == [f"{n}<out" for n in ("embed", *(f"layers.{k}" for k in range(4)))]
    assert scale.low < -6 and scale.high >= -2
    assert [name for _, name in scale.layers()] == ["0", "1", "2", "3"] or scale.layers() == []
    assert scale.y(0.0) == HIGH and scale.y(float("inf")) == TOP


def test_names_are_one_line():
    """Of samples, modules and sides: they come from traces and checkpoints of others."""
    made = samples()
    for sample in made:
        sample.sample_id = f"</svg>\x1b[31m\u202e\n{sample.sample_id}"
    report = mp.probe.run(layers(), layers(lambda k, n, x: x * 1.01 if k == 2 else x), made)
    report.a = report.command = made[0].sample_id
    for text in (*report.lines(), str(report.first), repr(report)):
        assert text.isprintable()


def test_lines_never_go_back(reports):
    first, other = reports
    moved = replace(other, modules=[other.modules[-1], *other.modules[:-1]])
    drawing, *_ = chart_parts([first, moved], ["first", "moved"])
    curves = [shape for shape in drawing.shapes if isinstance(shape, Curve)]
    assert len(curves) == 4
    for curve in curves:
        places = [x for x, _ in curve.points]
        assert places == sorted(places) and len(places) == len(first.modules)
