"""`mmpack view` of packs, plans and parity reports: pages and figures, and one line for what is wrong."""

import json

import pytest
from support import drawn
from support.gui import TRACE
from support.process import call_mmpack, refused

import mmpack as mp


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("documents")
    left, right = drawn.sides()
    mp.write_trace(out / "rollout.jsonl", left)
    mp.write_trace(out / "train.jsonl", right)
    mp.write_trace(out / "answers.jsonl", drawn.answers())
    drawn.planned().save(out / "plan.json")
    (out / "odd.json").write_text("{}")
    done = call_mmpack(
        "parity", out / "rollout.jsonl", out / "train.jsonl", "--out", out / "report.json"
    )
    assert done.returncode == 1
    return out


def written(folder, tmp_path, *options):
    """What a page says, its figure, and the document on stdout."""
    page, picture = tmp_path / "page.html", tmp_path / "figure.png"
    done = call_mmpack(
        "view", *(folder / o if "." in str(o) else o for o in options), "-o", page, "--png", picture, "--json"
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["html"], document["png"]) == (str(page), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    return page.read_text(encoding="utf-8"), document


def test_a_parity_report(folder, tmp_path):
    report = drawn.reported()
    html, document = written(folder, tmp_path, "report.json")
    assert document["findings"] == report.total_findings and document["ok"] is False
    assert "Layouts differ" in html and "Drift of logprobs, told apart" in html
    for cause in drawn.PLANTED:
        assert f'class="mm-cause">{cause}<' in html
    assert html.count("<td>input_ids</td>") == sum(f.field == "input_ids" for f in report.findings)
    assert "`mmpack parity A B --html FILE`" in html
    assert html == html.replace("<script", "")


def test_a_pack(folder, tmp_path):
    batch = mp.pack(drawn.answers(), share_prefix=True)
    html, document = written(folder, tmp_path, "answers.jsonl", "--pack")
    assert document["rows"] == batch.num_tokens and document["rows_alone"] == sum(
        batch.token_counts
    )
    assert html.count(">segment ") == len(batch.segment_parent)
    html, document = written(folder, tmp_path, "answers.jsonl", "--pack", "--limit", 3)
    assert document["more_samples"] and document["samples"] == 3
    assert "answers.jsonl, the first 3 samples" in html


def test_a_plan(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = drawn.planned()
    plan.save("step.json")
    done = call_mmpack("view", "step.json", "--json")
    about = {"plan": "step.json", "bins": len(plan.bins), "ranks": 3}
    assert json.loads(done.stdout) == about | {"html": "step.html", "png": None}
    assert (tmp_path / "step.html").read_text() == mp.view.html(plan, title="step.json")


@pytest.mark.parametrize("share", [True, False])
def test_a_micro_batch_of_a_plan(folder, tmp_path, share):
    plan = mp.plan(drawn.answers(), max_tokens=400, share_prefix=share)
    plan.save(folder / "own.json")
    options = ("answers.jsonl", "--plan", "own.json", "--bin")
    number = len(plan.bins) - 1
    html, document = written(folder, tmp_path, *options, number)
    assert document["samples"] == len(plan.bins[number]) > 1
    assert document["rows"] == plan.bin_rows[number]
    assert f"micro-batch {number} of own.json" in html


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("report.json", "--pack"), "--pack is of traces"),
        (("odd.json",), "neither a plan nor a parity report"),
        (("answers.jsonl", "--plan", "plan.json"), "--plan and --bin must be passed together"),
        (("answers.jsonl", "--plan", "plan.json", "--bin", 99), "--bin 99 is not in 'plan.json'"),
        (("rollout.jsonl", "--plan", "plan.json", "--bin", 0), "was made of other samples"),
        (("answers.jsonl", "--pack", "--tokenizer", "x"), "--tokenizer is of a trace's own page"),
        ((TRACE, "--pack"), "MM406"),
    ],
)
def test_what_is_wrong_is_one_line(folder, tmp_path, options, part):
    page = tmp_path / "page.html"
    given = [folder / o if "." in str(o) else o for o in options]
    refused("view", *given, "-o", page, parts=[part])
    assert not page.exists()
