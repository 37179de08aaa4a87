"""The page of a trace: what it holds, that it is one closed file, that nothing of a trace gets out of its text."""

import base64
import hashlib
import re

import numpy as np
import pytest
from hypothesis import given
from support import drawn
from support.gui import FOLDER, TRACE, words
from support.gui import samples as gui_samples
from support.html_page import Page
from support.samples import full_sample, make_sample
from support.samples import samples as any_samples
from support.trajectories import episode, grown

import mmpack as mp
from mmpack.trajectory import to_samples
from mmpack.view.trace.page import repeated

EVIL = '</script></style></title>"><script>evil=1</script><img src=x onerror=evil=1>javascript:\x1b[31m\u202e'


@pytest.fixture(scope="module")
def page():
    return Page(mp.view.html(gui_samples(), media_root=FOLDER, tokenizer=words))


def test_a_page_of_the_fixture(page):
    samples = gui_samples()
    assert len(page.all("article")) == len(samples)
    assert {f"s{k}" for k in range(len(samples))} <= {a.get("id") for _, a in page.tags}
    text = "".join(page.text)
    for part in ("shop/1-retry", "clicked an advertisement 0.5", "iou +0.86", "branches at 604"):
        assert part in text
    assert "The first 333 tokens are those of shop/0, which this goes on from." in text
    assert "47 of them are in the loss there and not here." in text
    assert (
        "click (300, 104)" in text
        and "left_click (" not in text
        and "swipe (500, 800) → (500, 250)" in text
    )


def test_rows_cover_every_token_that_no_other_sample_drew(page):
    at = [
        tuple(map(int, re.search(r"tokens (\d+) to (\d+)", row["aria-label"]).groups()))
        for row in page.rows()
    ]
    starts = [0, 333, 604, 0, 0, 0]
    for sample, start in zip(gui_samples(), starts, strict=True):
        while start < len(sample):
            assert at[0][0] == start
            start = at.pop(0)[1]
        assert start == len(sample)
    assert at == []
    loss = [row["aria-label"] for row in page.rows() if "loss" in row["class"].split()]
    spans = [(s.start, s.stop) for sample in gui_samples() for s in sample.loss_spans]
    assert [tuple(map(int, re.findall(r"tokens (\d+) to (\d+)", a)[0])) for a in loss] == spans


def test_each_picture_is_in_the_page_once_and_drawn_where_it_is_new(page):
    assert len(page.all("image")) == 3  # home, results, phone
    figures = page.all("figure")
    assert [f["id"] for f in figures] == ["s0m0", "s1m1", "s2m1", "s3m0", "s5m0"]
    used = [a["href"] for a in page.all("use")]
    assert used[:3] == ["#p0", "#p1", "#p1"]  # the strip of the trajectory
    assert set(used) == {f"#{a['id']}" for a in page.all("symbol")}


def test_it_loads_nothing_and_allows_one_style_and_one_script():
    html = mp.view.html(gui_samples(), media_root=FOLDER)
    page = Page(html)
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    for name in ("style", "script"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    urls = [a.get(k) for _, a in page.tags for k in ("src", "href") if a.get(k)]
    assert all(url.startswith(("#", "data:image/")) for url in urls)
    assert not [a for _, a in page.tags for k in a if k.startswith("on") or k == "style"]
    ids = {a.get("id") for _, a in page.tags}
    links = [a["href"] for a in page.all("a")]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)


def test_nothing_of_a_trace_gets_out_of_its_text():
    sample = full_sample(EVIL)
    sample.group_id = sample.trajectory_id = EVIL
    sample.media[0].media_id = sample.media[0].source = EVIL
    sample.region_spans[0].label = EVIL
    sample.bbox_targets[0].label = EVIL
    sample.action_spans[0].action = {"action": EVIL, "text": EVIL, "coordinate": [1, 2]}
    sample.rewards.append(mp.Score(name=EVIL, value=1.0, scope={"span": [0, 4]}))
    sample.metadata = {EVIL: EVIL, "token_texts": [EVIL] * len(sample)}
    html = mp.view.html([sample], title=EVIL, media_root=FOLDER)
    page = Page(html)
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert page.all("img") == [] and "<script>evil" not in html
    assert "\x1b" not in html and "\u202e" not in html
    assert not [a for _, a in page.tags for k in a if k.startswith("on")]
    assert "<script>evil=1</script>" in "".join(page.text)  # as text


@given(any_samples())
def test_any_sample_makes_a_page(sample):
    page = Page(mp.view.html([sample]))
    assert len(page.all("article")) == 1


def test_what_is_to_be_replayed_is_drawn():
    sample = make_sample([("text", [1, 2]), ("response", [5, 6], 0)])
    sample.kept_ids = mp.schema.Ragged.of([[5], [6, 7, 8]])
    sample.teachers = {"32B": mp.schema.Ragged.of([[5], []], [[-0.5], []])}
    sample.routed_experts = mp.schema.compact_routes([[[0, 1]]] * 4, 8)
    page = Page(mp.view.html([sample]))
    given = [dict(a)["data-q"] for _, a in page.tags if "data-q" in dict(a)]
    assert given == ["AABAAD"]  # 1 and 3 of base 64
    text = "".join(page.text)
    assert '"most": 3' in text and '"32B": {"lists": 2, "ids": 1' in text
    assert '"bytes_per_token": 2' in text


def broken():
    sample = make_sample([("text", [1, 2, 3]), ("image", (1, 4, 4)), ("response", [4, 5], 0)])
    sample.loss_spans = [mp.LossSpan(5, 900), mp.LossSpan(7, 2), mp.LossSpan(0, 1)]
    sample.modality_spans[0].media_index = 9
    sample.action_spans = [mp.schema.ActionSpan(800, 900, {"coordinate": "x"})]
    sample.region_spans = [mp.schema.RegionSpan(1, 2, 5, bbox=(1, 2, 3, 4))]
    sample.rollout_logprobs = np.zeros(3, np.float32)
    sample.coordinate_system = "absolute_pixels"
    return sample


def test_a_broken_sample_is_drawn_with_the_rules_that_it_breaks():
    sample = broken()
    page = Page(mp.view.html([sample]))
    text = "".join(page.by_class["problems"])
    assert mp.validate([sample])[0].code in text
    assert page.rows()


def test_without_a_tokenizer_ids_stand_for_tokens_and_runs_are_folded():
    sample = make_sample([("text", [11, 12]), ("response", [7] * 9 + [13], 0)])
    page = Page(mp.view.html([sample]))
    text = "".join(page.by_class["txt"])
    assert "11 12" in text and "7 × 9" in text and "13" in text


def test_long_context_is_folded_and_no_loss_token_is_left_out():
    rng = np.random.default_rng(0)
    ids = rng.integers(100, 900, 5000)
    sample = make_sample([("text", ids), ("response", ids, 0)])
    html = mp.view.html([sample])
    page = Page(html)
    assert len(page.all("summary")) == 4  # the key, the figures, the context, the fields
    drawn = "".join(page.by_class["txt"]).split()
    assert drawn[-5000:] == list(map(str, ids))
    assert "2,952 tokens are not drawn" in "".join(page.text)


def test_a_hundred_samples_stay_below_five_megabytes():
    rng = np.random.default_rng(0)
    samples = []
    for k in range(100):
        parts = [
            ("text", rng.integers(0, 100_000, 1500)),
            ("response", rng.integers(0, 100_000, 2596), 0),
        ]
        samples.append(make_sample(parts, f"s{k}", f"g{k}"))
        samples[-1].rollout_logprobs = rng.normal(-1, 1, 2596).astype(np.float32)
    html = mp.view.html(samples, tokenizer=lambda i: b"word"[: 1 + i % 4] + b" ")
    assert len(html.encode()) < 5_000_000


def test_pictures_share_a_budget():
    rng = np.random.default_rng(0)
    samples, pictures = [], {}
    for k in range(40):
        sample = make_sample(
            [("image", (1, 32, 48), f"p{k}"), ("response", [1], 0)], f"s{k}", f"g{k}"
        )
        pictures[sample.media[0].content_hash] = rng.integers(0, 256, (448, 672, 3), dtype=np.uint8)
        samples.append(sample)
    html = mp.view.html(samples, pictures=pictures)
    assert html.count("data:image/") == 40 and len(html) < 2_500_000


def test_pictures_below_the_root_only(tmp_path):
    (sample,) = [s for s in gui_samples() if s.sample_id == "shop/0"]
    (tmp_path / "secret.png").write_bytes((FOLDER / "screens/home.png").read_bytes())
    inside = tmp_path / "root"
    inside.mkdir()
    sample.media[0].source = "../secret.png"
    page = Page(mp.view.html([sample], media_root=inside))
    assert page.all("image") == [] and "is not below media_root" in "".join(page.text)
    assert page.all("rect", **{"class": "blank image"})


def test_a_limit_says_that_there_are_more():
    text = "".join(Page(mp.view.html(mp.read_trace(TRACE), limit=2)).text)
    assert "The first 2 samples; there are more." in text and "shop/1-retry" not in text
    assert "there are more" not in "".join(Page(mp.view.html(gui_samples(), limit=6)).text)


def test_fields_of_the_wrong_type_are_named_and_what_is_not_finite_is_drawn():
    sample = make_sample([("text", [1]), ("response", [2, 3], 0)])
    sample.input_ids = [1, 2, 3]
    assert len(Page(mp.view.html([sample])).rows()) == 2
    sample.rewards = [mp.Score(name="r", value=float("nan"))]
    sample.input_ids = np.array([1, 2, 3])
    assert "r nan" in "".join(Page(mp.view.html([sample])).text)
    for field, value in (("input_ids", "abc"), ("loss_spans", 3), ("media", None), ("turn", "x")):
        wrong = make_sample([("text", [1]), ("response", [2, 3], 0)])
        setattr(wrong, field, value)
        with pytest.raises(mp.MmpackError, match=field):
            mp.view.html([wrong])


def test_the_caption_says_in_what_system_places_were_read():
    sample = gui_samples()[3]
    assert "no coordinate_system" not in mp.view.html([sample])
    sample.coordinate_system = None
    assert "read as normalized_1000, as qwen3_vl writes" in mp.view.html([sample])


def test_the_film_names_the_turn_in_which_a_screen_came_back():
    turns = [
        *grown(3),
        *grown(2, seed=1),
    ]  # a growing context, whose third screen is the first; then a branch of it
    page = mp.view.html(to_samples(episode(turns)))
    words = re.findall(r"<b>(e/\d · turn \d)</b>", page)
    assert words[:3] == ["e/0 · turn 0", "e/0 · turn 1", "e/3 · turn 3"]


def test_counts_are_those_of_a_pack():
    samples = drawn.answers(2, 3)
    batch = mp.pack(samples, share_prefix=True)
    found = {name: (alone, shared) for name, alone, shared in repeated(samples)}
    assert found["rows"] == (batch.stats["tokens_unshared"], batch.stats["tokens"])
    assert found["media"] == (len(samples), len(batch.media))
    assert found["patches"] == (sum(s.num_patches for s in samples), batch.stats["patches"])


def test_the_page_leaves_broken_samples_out():
    samples = drawn.answers(2, 3)
    samples[0].loss_spans[0].start = 0
    html = mp.view.html(samples)
    assert "1 that break rules are left out." in html
    (rows,) = re.findall(r"<td>rows</td><td>([\d,]+)</td>", html)
    assert int(rows.replace(",", "")) == sum(len(s) for s in samples[1:])
    assert "no tokens of a sample" in mp.view.html([])
