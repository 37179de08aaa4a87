"""The first pages run: docs/start.md and its notebook; docs/migrating.md beside the mask that it starts from."""

import json
from pathlib import Path

import pytest
from test_docs_run import run

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("transformers")


def test_migrating(capsys):
    """The page compares each step with the loop as it was; it raises where they part."""
    names = run("docs/migrating.md", {})
    assert capsys.readouterr().out == "41 rows, where the rectangle had 44\n25 rows\n"
    assert len(names["hand_written"]) > 10


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("dashscope")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "start.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert (
        "8 samples" in printed
        and "max_pixels ·" in printed
        and "2 pictures for 8 samples" in printed
    )
    assert names["report"].ok and names["report"].compared == 8
    assert names["off"] < 1e-5 and names["out"].loss.isfinite()
    assert names["shared"].num_tokens < names["plain"].num_tokens / 2
