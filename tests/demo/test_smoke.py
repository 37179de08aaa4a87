"""The main job end to end: its figures, its injected causes, real data, and that learning goes the right way."""

import importlib.util
import io
import json

import pytest
import torch
import transformers
from packaging.version import Version
from rich.console import Console
from support.process import call_mmpack

from mmpack.demo import logprob_checks
from mmpack.demo.injection import CAUSES
from mmpack.demo.options import SmokeOptions
from mmpack.demo.report import Report
from mmpack.demo.run import run
from mmpack.errors import ArgumentError

SMALL = {"limit": 2, "n": 3, "max_new_tokens": 6}
SMALLEST = {"limit": 1, "n": 2, "max_new_tokens": 4}


def smoke(**options) -> Report:
    return run(SmokeOptions(**options), Console(file=io.StringIO()))


@pytest.mark.adapter
def test_every_check_holds_with_its_figure(tmp_path):
    report = smoke(**SMALL, workdir=tmp_path, html=tmp_path / "page.html")
    values = report.to_dict()
    assert report.failed == [] and report.exit_code == 0
    assert values["parity"] == {"ok": True, "compared": 6}
    worst = values["logprobs"]["max_abs_diff"]
    assert set(worst) == {"packed", "shared_prefix", "padded_left", "padded_right"}
    assert max(worst.values()) <= 1e-4 and values["logprobs"]["between_layouts"] <= 1e-5
    kept = values["kept_ids"]
    assert kept["max_abs_diff"] <= 1e-4 and abs(kept["ratio"] - 1) <= 1e-5
    assert kept["ratio_over_all_ids"] < 0.95 and 1 < kept["ids_per_token"] <= 1024
    assert values["loss_mask"]["leak"] == 0.0
    assert values["advantages"]["max_abs_diff"] <= 1e-5
    assert values["micro_batches"]["counts"] == [1, 5]
    tokens = values["tokens"]
    assert tokens["shared_prefix"] < tokens["packed"] <= tokens["padded"]
    assert values["grad_norm"] > 0 and values["ratio"]["gain"] > 0
    patches = values["patches"]
    once = patches["padded"] // SMALL["n"]
    assert patches["shared_prefix"] == once
    # older forwards take no embeddings: rows are repeated, and the figure says so
    takes_embeddings = Version(transformers.__version__) >= Version("5.19")
    assert patches["packed"] == (once if takes_embeddings else patches["padded"])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "data:image/" in page and "<svg" in page  # pictures and the drift of logprobs
    (tmp_path / "page.html").unlink()
    assert {p.name for p in tmp_path.iterdir()} == {"rollout.jsonl", "train.jsonl"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "cause",
    [c if i % 3 == 0 else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(CAUSES)],
)
def test_an_injected_cause_is_the_first_finding(cause):
    report = smoke(**SMALL, inject=cause)
    values = report.to_dict()
    assert report.exit_code == 1 and report.failed == ["parity"]
    assert values["first"]["cause"] == cause
    assert "loss" not in values  # no step is taken


@pytest.mark.slow
def test_real_problems(geo3k_dir):
    report = smoke(data=str(geo3k_dir), n=2, limit=2, max_new_tokens=4)
    assert report.failed == [] and report.values["parity"]["compared"] == 4


def test_the_command_prints_one_json_document(tmp_path):
    out = tmp_path / "smoke.json"
    done = call_mmpack(
        *("smoke", "--limit", "1", "--n", "2", "--max-new-tokens", "4"),
        *("--inject", "loss_mask_shift", "--json", "--out", str(out)),
    )
    assert done.returncode == 1
    printed = json.loads(done.stdout)
    assert printed["first"]["cause"] == "loss_mask_shift"
    assert json.loads(out.read_text()) == printed
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_one_sample_per_prompt():
    with pytest.warns(UserWarning, match="each of 2 samples is alone in its group"):
        assert smoke(limit=2, n=1, max_new_tokens=4).failed == []


@pytest.mark.slow
def test_learning_goes_up_and_with_negated_advantages_down():
    up = smoke(learn=True)
    assert up.values["learn"]["gain"] >= 0.2 and up.exit_code == 0
    down = smoke(learn=True, negate_advantages=True)
    assert down.values["learn"]["gain"] < 0 and down.exit_code == 1


@pytest.mark.slow
def test_a_layout_that_gives_nan_fails(monkeypatch):
    whole = logprob_checks.packed_logprobs

    def broken(model, batch, temperature=1.0, **options):
        out = whole(model, batch, temperature, **options)
        right = getattr(batch, "side", None) == "right"
        return torch.full_like(out, float("nan")) if right else out

    monkeypatch.setattr(logprob_checks, "packed_logprobs", broken)
    assert "logprobs" in smoke(**SMALLEST).failed


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_p": 0.9}, "--engine vllm"),
        ({"inject": "dtype"}, "--engine vllm"),
        ({"video": True, "learn": True}, "leave out --data and --learn"),
        ({"video": True, "inject": "max_pixels"}, "a fault of pictures"),
    ],
)
def test_options_that_contradict_each_other(options, match):
    with pytest.raises(ArgumentError, match=match):
        smoke(**options)


@pytest.mark.slow
def test_clips_of_both_kinds_of_family(tmp_path):
    pages = tmp_path.with_name("pages") / "step.html"
    pages.parent.mkdir()
    report = smoke(video=True, limit=2, n=2, max_new_tokens=4, workdir=tmp_path, html=pages)
    values = report.to_dict()
    assert report.failed == [] and report.exit_code == 0
    for family in ("qwen2_5_vl", "qwen3_vl"):
        one = values[family]
        assert one["ok"] and one["parity"] == {"ok": True, "compared": 4}
        assert max(one["logprobs"]["max_abs_diff"].values()) <= 1e-4
        assert one["grad_norm"] > 0 and one["loss_mask"]["leak"] == 0.0
        assert {p.name for p in (tmp_path / family).iterdir()} == {"rollout.jsonl", "train.jsonl"}
        lines = (tmp_path / family / "rollout.jsonl").read_text().splitlines()
        media = [json.loads(line)["media"] for line in lines]
        assert {m["modality"] for one in media for m in one} == {"video"}
        page = pages.with_stem(f"step-{family}").read_text()
        assert page.count("<image ") > 0 and "mm-empty" not in page.partition("</style>")[2]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_one_line():
    done = call_mmpack("smoke", "--engine", "vllm", "--limit", "1")
    assert done.returncode == 2 and "mmpack[vllm]" in done.stderr
    assert len(done.stderr.splitlines()) == 1
