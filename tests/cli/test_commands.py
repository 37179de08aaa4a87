"""Every command: what it prints, its JSON document, its exit code."""

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.drifts import planted, rollouts
from support.process import call_mmpack, run_mmpack, run_python
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.schema.codes import RULES

ROOT = Path(__file__).resolve().parents[2]
SECRET = "\x1b[31m[red]s\n"  # a sample id that must not reach a terminal as it is


def write(path, samples):
    mp.write_trace(path, samples)
    return path


@pytest.fixture
def trace(tmp_path):
    samples = [full_sample(f"s{i}", seed=i) for i in range(3)]
    samples[2].group_id = "g1"
    return write(tmp_path / "a.jsonl", samples)


@pytest.fixture
def broken(tmp_path):
    sample = full_sample("bad")
    sample.loss_spans[0].start = 0  # over the image, and more logprobs are missing
    return write(tmp_path / "broken.jsonl", [full_sample("good"), sample])


def document(result, code=0):
    assert result.returncode == code, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_parity_of_unlike_traces(tmp_path, trace):
    samples = list(mp.read_trace(trace))
    for sample in samples:
        sample.input_ids[0] += 1
    other, page = write(tmp_path / "b.parquet", samples), tmp_path / "page.html"
    result = call_mmpack("parity", trace, other, "--html", page, "--max-findings", 2)
    assert (result.returncode, result.stderr) == (1, "")
    first, *lines = result.stdout.splitlines()
    assert first.startswith("DIFFERENT: 3 samples compared, 3 findings")
    assert sum(line.startswith("  sample s") for line in lines) == 2
    assert lines[-1] == "and 1 more finding"
    assert "Layouts differ" in page.read_text()
    report = document(call_mmpack("parity", trace, other, "--json"), code=1)
    assert report["first"]["field"] == "input_ids" and report["first"]["index"] == 0


def test_parity_tells_the_drift_of_logprobs_apart(tmp_path):
    rng = np.random.default_rng(0)
    left = rollouts(rng, 40)
    for sample in left:
        sample.modality_spans = []
    right = copy.deepcopy(left)
    for sample, x in zip(right, planted(rng, left, "turns", 30, 1e-4), strict=True):
        sample.rollout_logprobs = np.minimum(x, 0).astype(np.float32)
    right[0].sampling = {"logprobs": "processed"}
    paths = [write(tmp_path / f"{n}.jsonl", side) for n, side in (("a", left), ("b", right))]
    result = call_mmpack("parity", *paths, "--html", tmp_path / "page.html")
    lines = result.stdout.splitlines()
    assert "logprobs: 1 sample left out: logprobs of unlike kinds" in lines
    (told,) = [line for line in lines if line.startswith("  drift is ")]
    assert "times larger from turn 1 on" in told
    assert any(line.split()[:4] == ["by", "group", "tokens", "samples"] for line in lines)
    drift = document(call_mmpack("parity", *paths, "--json"), code=1)["drift"]
    assert drift["left_out"] == {"logprobs of unlike kinds": 1} and "turn" in drift["axes"]
    assert "from turn 1 on" in (tmp_path / "page.html").read_text()
    assert document(call_mmpack("parity", paths[0], paths[0], "--json"))["drift"] == {
        "left_out": {"both traces carry the rollout's own logprobs": 40}
    }
    assert "drift" not in call_mmpack("parity", paths[0], paths[0]).stdout


def test_parity_requires_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", [make_sample([("text", [1, 2]), ("response", [3])])])
    assert document(call_mmpack("parity", path, path, "--json"))["drift"] is None  # no logprobs
    result = call_mmpack("parity", path, path, "--require", "input_ids, position_ids")
    assert result.returncode == 1 and result.stdout.startswith("NOT COMPARED: 1 sample compared")
    assert "required, but not compared: position_ids: not recorded" in result.stdout


def test_validate(trace, broken):
    result = call_mmpack("validate", trace)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "OK: 3 samples, 0 broken rules\n"
    assert document(call_mmpack("validate", trace, "--json"))["ok"] is True

    problems = mp.validate(mp.read_trace(broken))
    assert {"MM202", "MM203", "MM301"} <= {p.code for p in problems}
    result = call_mmpack("validate", broken)
    assert (result.returncode, result.stderr) == (1, "")
    first, *lines = result.stdout.splitlines()
    assert first == f"BROKEN: 2 samples, {len(problems)} broken rules"
    for line, problem in zip(lines, problems, strict=True):
        for part in (problem.code, "bad", problem.field, problem.message, problem.fix):
            assert part in line
    found = document(call_mmpack("validate", broken, "--json"), code=1)
    assert found["total_problems"] == len(problems)
    assert found["problems"][0]["fix"] == RULES[problems[0].code].fix


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".parquet"])
def test_validate_says_that_a_trace_is_empty(tmp_path, suffix):
    path = write(tmp_path / f"empty{suffix}", [])
    for _ in range(2):
        result = call_mmpack("validate", path)
        assert result.stdout.startswith("EMPTY: 0 samples, 0 broken rules\n")
        found = document(call_mmpack("validate", path, "--json"), code=1)
        assert (found["ok"], found["samples"], found["problems"]) == (False, 0, [])
        path.write_bytes(b"")  # not even a frame or a footer


def test_long_lists_end_with_a_count(tmp_path):
    samples = [
        make_sample([("text", [1]), ("response", [2])], sample_id=f"s{i}", group_id=f"g{i}")
        for i in range(103)
    ]
    path = write(tmp_path / "many.jsonl", samples)
    assert call_mmpack("plan", path, "--max-tokens", 2).stdout.endswith("and 53 bins more\n")
    for sample in samples:
        sample.loss_spans[0].start = 0
    lines = call_mmpack("validate", write(path, samples)).stdout.splitlines()
    assert len(lines) == 102 and lines[-1] == "and 3 more"
    found = document(call_mmpack("validate", path, "--json"), code=1)
    assert (len(found["problems"]), found["codes"]) == (100, {"MM202": 103})


def test_inspect_counts(trace, broken):
    samples = list(mp.read_trace(trace))
    media = {m.cache_key: m for s in samples for m in s.media}
    patches = {key: m.grid_thw[0] * m.grid_thw[1] * m.grid_thw[2] for key, m in media.items()}
    assert document(call_mmpack("inspect", trace, "--json")) == {
        "samples": 3,
        "tokens": sum(len(s.input_ids) for s in samples),
        "loss_tokens": 3 * 11,
        "media": 6,
        "videos": 3,
        "video_frames": sum(len(s.media[1].frame_indices) for s in samples),
        "patches": 3 * (24 + 32),
        "groups": 2,
        "distinct_media": 2,
        "distinct_patches": sum(patches.values()),
        "replay": {
            "samples with kept_ids": 3,
            "kept ids": sum(len(s.kept_ids.ids) for s in samples),
            "samples with teacher 32B": 3,
            "ids of teacher 32B": sum(len(s.teachers["32B"].ids) for s in samples),
            "samples with teacher Ω": 3,
            "ids of teacher Ω": sum(len(s.teachers["Ω"].ids) for s in samples),
            "samples with routed_experts": 3,
            "bytes of routes": sum(2 * 2 * len(s) for s in samples),
        },
        "families": {"qwen2_5_vl": 3},
        "processor_fingerprints": {samples[0].processor_fingerprint: 3},
        "broken_rules": {},
    }
    result = call_mmpack("inspect", broken)
    assert result.returncode == 0 and "broken_rules: MM203" in result.stdout


def test_inspect_lists_one_sample(trace):
    found = document(call_mmpack("inspect", trace, "--sample", "s1", "--json"))
    sample = list(mp.read_trace(trace))[1]
    loss = [s for s in found["spans"] if s["field"].startswith("loss_spans")]
    assert [(s["start"], s["stop"]) for s in loss] == [(s.start, s.stop) for s in sample.loss_spans]
    assert [s["start"] for s in found["spans"]] == sorted(s["start"] for s in found["spans"])
    assert [m["media_id"] for m in found["media"]] == ["plan", "clip"]
    (clip,) = (m for m in sample.media if m.modality == "video")
    (video,) = (m["video"] for m in found["media"] if "video" in m)
    assert video["frames"] == len(clip.frame_indices) and video["fps"] == clip.fps
    assert video["last_timestamp"] == clip.frame_timestamps[-1]
    replay, lengths = found["replay"], [len(row) for row in sample.kept_ids.lists()]
    figures = {"lists": 11, "ids": sum(lengths), "most": max(lengths)}
    assert figures.items() <= replay["kept_ids"].items()
    assert list(replay["teachers"]) == ["32B", "Ω"]
    routes = {"layers": 2, "experts_per_token": 2, "dtype": "uint8", "bytes_per_token": 4}
    assert replay["routed_experts"] == routes
    text = call_mmpack("inspect", trace, "--sample", "s1").stdout
    assert "teacher 32B" in text and "bytes_per_token=4" in text
    assert "observation_spans[0]" in text and "source=tool" in text and "[1, 4, 6]" in text


def test_ids_are_escaped_for_people(tmp_path):
    sample = full_sample(SECRET)
    sample.media[0].media_id = SECRET
    path = write(tmp_path / "a.jsonl", [sample])
    result = call_mmpack("inspect", path, "--sample", SECRET)
    assert result.returncode == 0 and "\x1b" not in result.stdout
    assert result.stdout.count("\\x1b[31m[red]s\\n") == 2


def test_plan(trace):
    options = ("--max-tokens", 100, "--max-patches", 200, "--max-samples", 2, "--share-prefix")
    found = document(call_mmpack("plan", trace, *options, "--json"))
    samples = list(mp.read_trace(trace))
    plan = mp.plan(samples, max_tokens=100, max_patches=200, max_samples=2, share_prefix=True)
    assert [b["samples"] for b in found["bins"]] == [
        [samples[i].sample_id for i in members] for members in plan.bins
    ]
    assert (found["stats"], found["ranks"]) == (plan.stats, plan.ranks)
    assert (found["total_samples"], found["total_tokens"]) == (3, 33)
    text = call_mmpack("plan", trace, "--max-tokens", 48, "--ranks", 3).stdout
    assert "balance" in text and len(text.partition("\nbin  ")[2].splitlines()) == 1 + 3
    assert len(text.partition("\nrank  ")[2].partition("\n\n")[0].splitlines()) == 1 + 3
    assert "max_tokens 97.9%" in " ".join(text.split())


def test_version():
    result = run_mmpack("--version")
    assert (result.returncode, result.stdout) == (0, f"mmpack {mp.__version__}\n")


def test_plan_counts_shared_rows_once(tmp_path):
    """Eight answers of 4 ids to one prompt of 40: 72 rows, 352 tokens."""
    samples = [
        make_sample([("text", list(range(40))), ("response", [100 + i, 1, 2, 3])], f"s{i}")
        for i in range(8)
    ]
    path = write(tmp_path / "a.jsonl", samples)
    found = document(call_mmpack("plan", path, "--max-tokens", 80, "--share-prefix", "--json"))
    (only,) = found["bins"]
    assert (only["rows"], only["tokens"], only["patches"], only["loss_tokens"]) == (72, 352, 0, 32)
    batch = mp.pack(samples, share_prefix=True)
    assert only["rows"] == batch.num_tokens == found["stats"]["rows_shared"]
    text = call_mmpack("plan", path, "--max-tokens", 80, "--share-prefix").stdout.splitlines()
    shared, others = ["tokens", "share"], ["patches", "loss_tokens", "cost"]
    columns = ["bin", "rank", "samples", "rows", *shared, *others]
    assert text[-2].split() == columns
    assert text[-1].split()[:-1] == ["0", "0", "8", "72", "352", "yes", "0", "32"]
    text = call_mmpack("plan", path, "--max-tokens", 80).stdout.splitlines()
    head = next(line.split() for line in text if line.startswith("bin "))
    assert head == [name for name in columns if name not in shared]


def test_plan_shares_where_it_pays(tmp_path):
    prompts = {"long": 60, "tiny": 2}
    samples = [
        make_sample([("text", range(n)), ("response", range(500 + k, 800 + k))], f"{g}{k}", g)
        for g, n in prompts.items()
        for k in range(2)
    ]
    path = write(tmp_path / "a.jsonl", samples)
    options = ("--max-tokens", 660, "--auto-share")
    found = document(call_mmpack("plan", path, *options, "--json"))
    assert [(b["share"], b["rows"]) for b in found["bins"]] == [(True, 660), (False, 604)]


CONFIG = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 1000,
}


def test_plan_says_how_large_packs_may_be(trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    samples = list(mp.read_trace(trace))
    plan = mp.plan(samples, model=CONFIG, memory=3_000_000)
    stats = plan.stats
    # as many rows as fit with gradients, which is what bounds the bins
    assert stats["fill"] == sum(plan.bin_rows) / (len(plan.bins) * stats["max_tokens_grad"])
    assert stats["max_tokens_no_grad"] == stats["no_grad_ratio"] * stats["max_tokens_grad"]
    assert stats["no_grad_ratio"] > 2
    for given in (tmp_path, tmp_path / "config.json"):
        found = document(call_mmpack("plan", trace, "--model", given, "--memory", "3MB", "--json"))
        assert found["stats"] == stats


PAGES = {
    (): "schemas/sample.schema.json",
    ("--action",): "schemas/action.schema.json",
    ("--rules",): "docs/rules.md",
}


@pytest.mark.parametrize("options", PAGES)
def test_schema(tmp_path, options):
    page, stale = ROOT / PAGES[options], tmp_path / "stale"
    result = call_mmpack("schema", *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == page.read_text(encoding="utf-8")
    assert call_mmpack("schema", *options, "--check", page).returncode == 0
    stale.write_text(result.stdout + "\n")
    result = call_mmpack("schema", *options, "--check", stale)
    assert (result.returncode, result.stdout) == (1, "") and "stale" in result.stderr


def test_doctor_says_which_op_runs_on_what(monkeypatch):
    def report(backend, attention="auto"):
        monkeypatch.setenv("MMPACK_BACKEND", backend)
        monkeypatch.setenv("MMPACK_ATTENTION", attention)
        monkeypatch.setenv("MMPACK_TOWER_ATTENTION", attention)
        linear = "auto" if attention == "auto" else "fla"
        monkeypatch.setenv("MMPACK_LINEAR_ATTENTION", linear)
        found = document(call_mmpack("doctor", "--json"))
        assert found["mmpack"] == mp.__version__ and found["packages"]["numpy"] == np.__version__
        return {op["op"]: op for op in found["ops"]}

    import torch

    by_itself = report("auto")
    assert {"selected_logprobs", "policy_loss", "group_advantages"} <= by_itself.keys()
    assert report("torch")["policy_loss"]["why"] == "MMPACK_BACKEND=torch"
    if torch.cuda.is_available():
        return
    on_a_cpu = {"op": "policy_loss", "backend": "torch", "why": "on a CPU"}
    assert by_itself["policy_loss"] == on_a_cpu
    forced = report("triton", "varlen")
    assert {op["backend"] for op in forced.values()} == {None}
    assert "MMPACK_BACKEND is triton, but triton " in forced["policy_loss"]["why"]
    for op in ("attention", "tower attention"):
        assert by_itself[op]["backend"] == "sdpa"
        assert "varlen needs a CUDA device, not cpu. Fix: " in forced[op]["why"]
    assert "it needs a GPU, not cpu. Fix: " in forced["linear attention"]["why"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import importlib.metadata as m; real = m.version\n"
            "m.version = lambda name: real(name if name != 'torch' else 'no-such-package')",
            "not installed: pip install 'mmpack[torch]'",
        ),
        ("sys.modules['torch'] = None", "torch fails: ModuleNotFoundError"),
    ],
)
def test_doctor_without_torch_and_with_a_broken_one(code, said):
    main = "\nfrom mmpack.cli.main import main; sys.exit(main(['doctor']))"
    result = run_python(f"import sys\n{code}{main}")
    assert result.returncode == 0 and said in result.stdout, result


def test_out_writes_what_json_prints(tmp_path, trace):
    for args in (["validate", trace], ["plan", trace, "--max-tokens", 99]):
        out = tmp_path / "out.json"
        result = call_mmpack(*args, "--out", out)
        assert result.returncode == 0 and not result.stdout.startswith("{")
        assert out.read_text() == call_mmpack(*args, "--json").stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.json"]


def test_output_to_an_ascii_terminal(tmp_path):
    path = write(tmp_path / "a.jsonl", [full_sample("Ω")])
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = run_mmpack("inspect", path, "--sample", "Ω", env=env)
    assert result.returncode == 0 and "sample \\u03a9" in result.stdout
