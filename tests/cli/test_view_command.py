"""`mmpack view`: files that are whole or not there, the choice of samples, one line for what is wrong."""

import json

import pytest
from support.gui import FOLDER, TRACE
from support.process import call_mmpack, refused

import mmpack as mp


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from mmpack.demo.vocabulary import qwen_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    qwen_tokenizer().save_pretrained(folder)
    return folder


def test_a_page_and_a_figure(tmp_path, tokenizer):
    page, figure = tmp_path / "page.html", tmp_path / "figure.png"
    options = ("--media-root", FOLDER, "--tokenizer", tokenizer, "--json")
    done = call_mmpack("view", TRACE, "-o", page, "--png", figure, *options)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["samples"] == 6 and document["trajectories"] == 2
    assert (document["html"], document["png"]) == (str(page), str(figure))
    (missing,) = document["drawn_without_picture"].values()
    assert "source" in missing  # the clip's
    html = page.read_text(encoding="utf-8")
    assert "The shop&#39;s search box is at the top of the page." in html
    assert html.count("data:image/") == 3
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figure.png", "page.html"]


@pytest.mark.parametrize("kind", [".jsonl.zst", ".parquet"])
def test_every_kind_of_trace_and_the_name_of_the_page(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    mp.write_trace(f"some.trace{kind}", mp.read_trace(TRACE))
    done = call_mmpack("view", f"some.trace{kind}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("6 samples drawn\nsome.trace.html\n")
    assert (tmp_path / "some.trace.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "drawn", "absent"),
    [
        (("--trajectory", "phone", "--sample", "text/0"), ["phone/0", "text/0"], "shop/0"),
        (("--limit", 2), ["shop/0", "shop/1"], "shop/1-retry"),
    ],
)
def test_a_choice(tmp_path, options, drawn, absent):
    page = tmp_path / "page.html"
    done = call_mmpack("view", TRACE, "-o", page, *options, "--json")
    document = json.loads(done.stdout)
    assert document["samples"] == len(drawn)
    assert document["more_samples"] == ("--limit" in options)
    html = page.read_text(encoding="utf-8")
    assert all(f'aria-label="sample {name}"' in html for name in drawn)
    assert f'aria-label="sample {absent}"' not in html


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--sample", "no such"), "there is no sample 'no such'"),
        (("--trajectory", "no such"), "there is no trajectory 'no such'"),
        (("--tokenizer", "no/such/folder"), "--tokenizer: 'no/such/folder' can't be loaded"),
        (("-o", "no/such/page.html"), "the folder of"),
        (("-o", "page.png"), "Fix: pass --png page.png"),
    ],
)
def test_what_is_wrong_is_one_line_and_leaves_the_old_page(tmp_path, options, part):
    page = tmp_path / "page.html"
    page.write_text("old")
    options = options if "-o" in options else ("-o", page, *options)
    refused("view", TRACE, *options, parts=[part])
    assert page.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("text", "part"), [("", "holds no sample"), ("{", "MM0")])
def test_what_holds_no_sample_is_refused(tmp_path, text, part):
    (tmp_path / "trace.jsonl").write_text(text)
    refused("view", tmp_path / "trace.jsonl", "-o", tmp_path / "page.html", parts=[part])
    assert not (tmp_path / "page.html").exists()
