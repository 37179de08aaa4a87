"""`mmpack parity --html`: pictures and text of a page; a bad option or trace leaves the old file as it was."""

from pathlib import Path

from support.process import call_mmpack

ROOT = Path(__file__).resolve().parent.parent.parent
PAIR = [ROOT / f"fixtures/causes/retokenized_response/{n}.jsonl" for n in ("rollout", "train")]


def test_a_page_is_whole_or_not_there(tmp_path):
    from mmpack.demo.vocabulary import qwen_tokenizer

    tokenizer, page = tmp_path / "tokenizer", tmp_path / "page.html"
    qwen_tokenizer().save_pretrained(tokenizer)
    pictures = ROOT / "mmpack/demo/problems/train"
    options = ("--html", page, "--media-root", pictures, "--tokenizer", tokenizer)
    done = call_mmpack("parity", *PAIR, *options)
    assert done.returncode == 1 and "decoded and compared" in done.stdout
    html = page.read_text(encoding="utf-8")
    assert "data:image/png;base64," in html and "perp" in html and "perpendicular" in html
    broken = tmp_path / "broken.jsonl"
    broken.write_text(PAIR[1].read_text()[:200])
    for given in (
        (*PAIR, "--tokenizer", "no/such/folder"),
        (*PAIR, "--media-root", "no/such/folder"),
        (PAIR[0], broken),
    ):
        done = call_mmpack("parity", *given, "--html", page)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert page.read_text(encoding="utf-8") == html
