"""`mmpack parity --html`: options, exit codes, and a file that is whole or not there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAIR = [ROOT / f"fixtures/causes/retokenized_response/{n}.jsonl" for n in ("rollout", "train")]


def parity(*options):
    code = "import sys; from mmpack.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "parity", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from mmpack.demo.vocabulary import qwen_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    qwen_tokenizer().save_pretrained(folder)
    return folder


def test_pictures_and_text(tmp_path, tokenizer):
    page = tmp_path / "page.html"
    pictures = ROOT / "mmpack/demo/problems/train"
    done = parity(*PAIR, "--html", page, "--media-root", pictures, "--tokenizer", tokenizer)
    assert (done.returncode, done.stderr) == (1, "")
    assert "decoded and compared" in done.stdout
    html = page.read_text(encoding="utf-8")
    assert "data:image/png;base64," in html and "perp" in html and "perpendicular" in html
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokenizer", "no/such/folder"), "--tokenizer: 'no/such/folder' can't be loaded"),
        (("--media-root", "no/such/folder"), "--media-root"),
    ],
)
def test_bad_options_write_nothing(tmp_path, options, message):
    page = tmp_path / "page.html"
    page.write_text("old")
    done = parity(*PAIR, "--html", page, *options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
    assert page.read_text() == "old"


def test_a_trace_that_breaks_off_leaves_the_old_page(tmp_path):
    page, broken = tmp_path / "page.html", tmp_path / "broken.jsonl"
    page.write_text("old")
    broken.write_text(PAIR[1].read_text()[:200])
    assert parity(PAIR[0], broken, "--html", page).returncode == 2
    assert page.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
