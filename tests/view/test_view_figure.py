"""The figure for a paper: a PNG whose pixels are where the trace says, of any trace; and the fixture."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image
from support.gui import FOLDER, words
from support.gui import samples as gui_samples
from support.samples import full_sample, make_sample
from support.samples import samples as any_samples

import mmpack as mp
from mmpack.view.sheet import SCALE, Sheet, written
from mmpack.view.trace.figure import COLOURS, MARGIN, MARKS, WIDTH
from mmpack.view.trace.roles import ROLES


def pixels(samples, **options):
    data = mp.view.png(samples, **options)
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def of_colour(picture, colour, near=0):
    """bool [h, w]."""
    rgb = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)])
    return np.abs(picture - rgb).max(axis=2) <= near


def test_the_bar_is_to_scale():
    context = [("text", [1] * 30), ("image", (1, 8, 10)), ("text", [2] * 8)]
    sample = make_sample([*context, ("response", [3] * 40, 0, "action")])
    picture = pixels([sample])
    widths = {
        name: of_colour(picture, COLOURS[ROLES.index(name)]).sum(axis=1).max()
        for name in ("picture", "action")
    }
    assert widths["picture"] / widths["action"] == pytest.approx(20 / 40, rel=0.02)
    ys, xs = np.nonzero(of_colour(picture, COLOURS[ROLES.index("prompt")]))
    left, right = xs[ys == np.bincount(ys).argmax()].min(), (WIDTH - MARGIN) * SCALE
    assert widths["action"] / (right - left) == pytest.approx(40 / len(sample), rel=0.02)


def test_a_click_is_drawn_at_its_place():
    """The ring around a click on a black screen, whose corner is where the black begins."""
    (sample,) = [s for s in gui_samples() if s.sample_id == "shop/0"]
    sample.region_spans, sample.bbox_targets = None, None
    black = np.zeros((364, 560, 3), np.uint8)
    picture = pixels([sample], pictures={sample.media[0].content_hash: black})
    ys, xs = np.nonzero(of_colour(picture, "#000000"))
    top, left, bottom, right = ys.min(), xs.min(), ys.max(), xs.max()
    ring = of_colour(picture, MARKS["action"], 40)
    ring[:top], ring[bottom:] = False, False
    y, x = (np.median(v) for v in np.nonzero(ring))
    # the letter beside it pulls the middle by a few pixels
    assert (x - left) / (right - left) == pytest.approx(230 / 560, abs=0.04)
    assert (y - top) / (bottom - top) == pytest.approx(38 / 364, abs=0.04)


def test_pixels_of_the_screen_are_in_the_figure():
    red = np.full((364, 560, 3), (200, 30, 40), np.uint8)
    sample = gui_samples()[0]
    drawn = pixels([sample], pictures={sample.media[0].content_hash: red})
    assert of_colour(drawn, "#c81e28").sum() > 50_000
    assert of_colour(pixels([sample]), "#c81e28").sum() == 0


@settings(max_examples=6)
@given(any_samples())
def test_any_sample_makes_a_figure(sample):
    data = mp.view.png([sample])
    assert Image.open(io.BytesIO(data)).width == 2880


def test_ids_of_any_length_are_drawn():
    """Pillow takes no line of a million characters."""
    sample = full_sample("é" * 1_200_000)
    sample.trajectory_id = sample.group_id = "x" * 1_200_000
    assert Image.open(io.BytesIO(mp.view.png([sample]))).width == 2880


def test_what_the_font_lacks_is_escaped():
    assert written("é? 中 × →\x07").startswith(("é?", "\\xe9?"))
    assert "\\u4e2d" in written("中") and written("×→") == "x->" and "\\x07" in written("\x07")


def test_text_is_wrapped_at_words_and_cut():
    sheet = Sheet(400, "#ffffff")
    lines = sheet.wrapped("one two three four five six seven eight nine ten " * 9, 15, 200, 3)
    assert len(lines) == 3 and lines[-1].endswith("…")
    assert all(sheet.width(line, 15) <= 200 for line in lines)
    assert lines[0].endswith(" ")  # at a word
    assert "".join(sheet.wrapped("x" * 90, 15, 100, 99)) == "x" * 90
    assert sheet.image(1000).size == (400 * SCALE, 1000 * SCALE)


def test_a_figure_that_is_too_high_is_refused():
    parts = [part for k in range(500) for part in (("text", [k]), ("response", [k], k))]
    with pytest.raises(mp.ArgumentError, match="higher than 32,000 pixels"):
        mp.view.png([make_sample(parts)])


def test_the_fixture_breaks_no_rule_and_is_small():
    assert mp.validate(gui_samples()) == []
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.*")) < 150_000
    assert (FOLDER.parent.parent / "docs/view.png").stat().st_size < 200_000


def test_a_tokenizer_gives_text_in_place_of_ids():
    sample = gui_samples()[4]
    ids, text = pixels([sample]), pixels([sample], tokenizer=words)
    assert ids.shape != text.shape or (ids != text).any()
