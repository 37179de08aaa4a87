"""The page: what it shows, that it is one file without scripts, and that nothing of a trace gets out of its text."""

import base64
import hashlib
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.html_page import Page
from support.planting.episodes import decode, episode, other, settings

import mmpack as mp
from mmpack import compare
from mmpack.parity.report import Finding, ParityReport
from mmpack.view.parity.parts import LEFT

ROOT = Path(__file__).resolve().parent.parent.parent
TRACES = ROOT / "fixtures/causes"
PICTURES = ROOT / "mmpack/demo/problems/train"
EVIL = "</style></title><script>evil=1</script><img src=x onerror=evil=1>\x1b[31m\u202e"
PNG = "data:image/png;base64,"


def pair(cause):
    return [list(mp.read_trace(TRACES / cause / f"{n}.jsonl")) for n in ("rollout", "train")]


def evil_pair():
    left = other(episode(), sample_id=EVIL, processor=settings(chat_template=EVIL))
    right = other(episode(grid=(1, 4, 4)), sample_id=EVIL)
    left.rollout_logprobs = np.full(left.num_loss_tokens, -0.5, np.float32)
    left.sampling = {"logprobs": EVIL}
    for sample in (left, right):
        sample.media[0].media_id = sample.media[0].source = EVIL
    return [left], [right]


def test_it_is_one_file_that_loads_and_runs_nothing(tmp_path):
    html = compare(*pair("max_pixels")).to_html(media_root=PICTURES)
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "img", "object"} == set()
    for _, attributes in page.tags:
        assert not [name for name in attributes if name in ("src", "style", "srcset", "action")]
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", PNG).startswith(PNG)
    assert "url(" not in html and "@import" not in html and "http:" not in html
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    style = re.search("<style>(.*?)</style>", html, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy["content"].split("; ")[:3] == [
        "default-src 'none'",
        "img-src data:",
        f"style-src 'sha256-{digest}'",
    ]


def strips(page):
    """(class, x, width, y) of each span of the first card's strip."""
    start = next(
        i for i, (_, a) in enumerate(page.tags) if "mm-strip" in (a.get("class") or "").split()
    )
    out = []
    for tag, a in page.tags[start + 1 :]:
        if tag == "rect":
            out.append((a["class"], float(a["x"]) - LEFT, float(a["width"]), float(a["y"])))
        elif tag == "line":
            return out, float(a["x1"]) - LEFT
    raise AssertionError("no mark")


def test_strips_are_the_spans_of_both_sides_on_one_scale():
    left, right = pair("max_pixels")
    spans, mark = strips(Page(compare(left, right).to_html()))
    scale = (1000 - LEFT) / len(left[0])
    for y, sample in zip(sorted({s[3] for s in spans}), (left[0], right[0]), strict=True):
        (picture,) = sample.modality_spans
        (response,) = sample.loss_spans
        wanted = [("mm-text", 0, picture.start), ("mm-image", picture.start, picture.stop)]
        wanted.append(("mm-text", picture.stop, response.start))
        wanted.append(("mm-loss", response.start, response.stop))
        drawn = [(c, x, x + w) for c, x, w, row in spans if row == y]
        assert [c for c, _, _ in drawn] == [c for c, _, _ in wanted]
        bounds = [(a * scale, b * scale) for _, a, b in wanted]
        np.testing.assert_allclose([d[1:] for d in drawn], bounds, atol=0.02)
    first = np.flatnonzero(left[0].input_ids[: len(right[0])] != right[0].input_ids)[0]
    assert mark == pytest.approx(first * scale, abs=0.01)


def test_tokens_around_the_first_difference_are_decoded():
    left, right = [episode()], [episode(response=(701, 704, 151645))]
    html = compare(left, right, decode=decode).to_html(decode=decode)
    page = Page(html)
    shown = "".join(page.text)
    assert "first difference: token 21 (ids)" in shown
    assert "abc<151645>" in shown  # the rollout's and the train's text
    assert page.all("td", title="token 21: id 700, loss") and page.all(
        "td", title="token 21: id 701, loss"
    )
    assert "700 703" in "".join(Page(compare(left, right).to_html()).text)  # ids without a decoder


def thumbnails(page):
    return [
        np.asarray(Image.open(_bytes(a["href"])).convert("RGB"))
        for a in page.all("image", preserveaspectratio="none")
    ]


def _bytes(uri):
    import io

    return io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))


def test_thumbnails_and_their_grids():
    left, right = pair("max_pixels")
    page = Page(compare(left, right).to_html(media_root=PICTURES))
    source = Image.open(PICTURES / left[0].media[0].source).convert("RGB")
    for picture in thumbnails(page):
        small = source.resize(picture.shape[1::-1])
        assert np.abs(picture.astype(int) - np.asarray(small)).mean() < 8
    assert len(thumbnails(page)) == 2
    paths = [a["d"] for a in page.all("path", **{"class": "mm-grid"})]
    for path, sample in zip(paths, (left[0], right[0]), strict=True):
        _, h, w = sample.media[0].grid_thw
        assert (path.count("V"), path.count("H")) == (w // 2 + 1, h // 2 + 1)
    assert thumbnails(Page(compare(left, right).to_html())) == []


def test_pictures_in_memory_and_files_that_are_not_the_recorded_picture(tmp_path):
    left, right = pair("max_pixels")
    pixels = np.full((36, 64, 3), (200, 10, 30), np.uint8)
    known = {left[0].media[0].content_hash: pixels}
    shown = thumbnails(Page(compare(left, right).to_html(pictures=known)))
    assert len(shown) == 2 and (shown[0] == (200, 10, 30)).all()
    target = tmp_path / left[0].media[0].source
    target.parent.mkdir()
    for source, said in (
        (None, "is not a file below media_root"),
        (target, "pixels are not those recorded"),
        (tmp_path.parent / "secret.png", "is not below media_root"),
    ):
        if source is not None:
            Image.new("RGB", (640, 360), "red").save(source)
        if source not in (None, target):
            for sample in (left[0], right[0]):
                sample.media[0].source = "../secret.png"
        html = compare(left, right).to_html(media_root=tmp_path)
        assert said in html and bool(thumbnails(Page(html))) == (source == target)


def test_a_huge_source_is_not_read(tmp_path):
    """A sparse file of two gigabytes, and one of 200 megabytes: size and header are looked at first."""
    left, right = pair("max_pixels")
    target = tmp_path / left[0].media[0].source
    target.parent.mkdir()
    report = compare(left, right)
    for size, why in (
        (2**31, "it has 2147483648 bytes, more than 268435456"),
        (2 * 10**8, "unknown format"),
    ):
        with target.open("wb") as file:
            file.truncate(size)
        tracemalloc.start()
        html = report.to_html(media_root=tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert why in html and not thumbnails(Page(html))
        assert peak < 2**24


def scored(sample, logprobs):
    sampling = {"temperature": 1.0, "logprobs": "raw"}
    return other(sample, rollout_logprobs=np.asarray(logprobs, np.float32), sampling=sampling)


def test_drift_of_logprobs_by_token():
    left, right = episode(), episode()
    n = left.num_loss_tokens
    base = np.full(n, -1.0)
    moved = base + np.where(np.arange(n) == 2, -0.5, 0.125)
    report = compare([scored(left, base)], [scored(right, moved)])
    assert report.ok
    page = Page(report.to_html())
    start = next(i for i, (_, a) in enumerate(page.tags) if a.get("class") == "mm-d mm-drift")
    bars = [a for tag, a in page.tags[start:] if tag == "rect"]
    assert [a["class"] for a in bars] == ["mm-up"] * 2 + ["mm-down"] + ["mm-up"] * (n - 3)
    heights = np.array([float(a["height"]) for a in bars])
    np.testing.assert_allclose(heights / heights.max(), np.abs(moved - base) / 0.5, atol=0.01)
    handed = compare([scored(left, base)], [right])
    assert "mm-drift" not in "".join(str(t) for t in Page(handed.to_html()).tags)
    html = handed.to_html(train_logprobs={"s0": moved})
    assert [a for a in Page(html).all("rect") if a.get("class") == "mm-down"]


def test_bars_are_named_by_their_loss_token_where_others_are_not_finite():
    left, right = episode(), episode()
    base = np.full(left.num_loss_tokens, -1.0)
    moved = base + 0.125
    moved[0] = np.nan
    page = Page(compare([scored(left, base)], [right]).to_html(train_logprobs={"s0": moved}))
    named = [text for text in page.text if text.startswith("loss token ")]
    assert named == [f"loss token {k}: +0.125" for k in range(1, len(base))]


def test_logprobs_that_are_not_compared():
    """Of other tokens, and those that train only carries along."""
    left, right = episode(), episode(response=(701, 704, 151645))
    n = left.num_loss_tokens
    html = compare([scored(left, [-1.0] * n)], [scored(right, [-1.0] * n)]).to_html()
    assert "logprobs of other ids: not compared" in html
    left = scored(episode(), -np.arange(1.0, n + 1))
    page = compare([left], [other(left)]).to_html()
    assert "carry the rollout's own logprobs" in "".join(Page(page).text)
    assert 'class="mm-d mm-drift"' not in page


def test_a_notebook_shows_the_same_as_a_fragment():
    report = compare(*pair("chat_template"))
    page, part = Page(report.to_html()), Page(report._repr_html_())
    assert not {tag for tag, _ in part.tags} & {"html", "head", "body", "meta"}
    assert part.tags[0] == ("div", {"class": "mmpack"})
    drawn = [t for t in part.tags if t[0] in ("svg", "rect", "td", "section")]
    assert drawn == [t for t in page.tags if t[0] in ("svg", "rect", "td", "section")]


def test_big_reports_stay_small_and_say_what_is_left_out():
    left = [other(episode(), sample_id=f"s{i}") for i in range(520)]
    right = [other(episode(system=(9,)), sample_id=f"s{i}") for i in range(520)]
    report = compare(left, right, max_findings=500)
    html = report.to_html()
    page = Page(html)
    assert len(page.all("section")) == 20 and len(report.pairs) == 20
    listed = 20 * 4 + 200
    assert f"{report.total_findings - listed} more findings are not shown" in "".join(page.text)
    assert len(html) < 1_000_000


def test_reports_without_samples():
    for report in (compare([], []), compare([episode()], [other(episode(), sample_id="s1")])):
        page = Page(report.to_html())
        assert not page.all("section")
    assert "no such sample" in "".join(page.text)
    assert "pairs" not in report.to_dict()


def test_what_shows_a_cause_is_said_once():
    why = "processor.image.max_pixels: rollout 9, train 3"
    found = [
        Finding("s", field, None, None, "a", "b", "max_pixels", evidence)
        for field, evidence in [("media", f"same grid, other cache_key; {why}"), ("processor", why)]
    ]
    report = ParityReport(
        ok=False, compared=1, require=(), first=found[0], findings=found, total_findings=2
    )
    assert mp.view.html(report).count(why) == 1
