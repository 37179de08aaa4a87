"""The code in README.md and the pages runs, block after block, as it is printed."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.ops.invariance import is_on
from mmpack.planning import Counts
from mmpack.versions import takes_encoded_media

pytestmark = pytest.mark.adapter
ROOT = Path(__file__).resolve().parent.parent
EOS = 151645


def blocks(page):
    """(first line, code) of each python block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(1)), found[1])
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def run(page, names, code=None):
    """Run the blocks of a page (or those given) in one namespace, with lines numbered as in the page."""
    for line, block in blocks(page) if code is None else code:
        exec(compile("\n" * line + block, str(ROOT / page), "exec"), names)
    return names


@pytest.fixture(scope="module")
def yours():
    """What the pages take from the reader: a model, a processor, and what an engine returned."""
    hf, model = qwen_vl_processor(max_pixels=16 * 28 * 28), tiny_qwen2_5_vl()
    processor = mp.wrap_processor(hf)
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (56, 84, 3), dtype=np.uint8) for _ in range(2)]
    responses, problems = [], []
    for i in range(6):
        group = i // 3
        parts = [{"type": "image", "image": pictures[group]}, {"type": "text", "text": "How many?"}]
        messages = [{"role": "user", "content": parts}]
        problems.append({"messages": messages, "id": f"p{i}"})
        ids = [*rng.integers(0, 1000, 3 + i).tolist(), EOS]
        sample = processor(messages, response_ids=ids, sample_id=str(i), group_id=f"g{group}")
        with attach(model), torch.no_grad():
            logprobs = packed_logprobs(model, mp.pack([sample]))
        text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        responses.append(
            {
                "messages": messages,
                "prompt_ids": hf.tokenizer(text)["input_ids"],
                "response_ids": ids,
                "images": [pictures[group]],
                "logprobs": logprobs.tolist(),
                "sample_id": f"s{i}",
                "group_id": f"g{group}",
                "reward": i % 2,
            }
        )
    return {"model": model, "hf_processor": hf, "responses": responses, "problems": problems}


def test_readme(yours):
    code = [block for block in blocks("README.md") if "from trl" not in block[1]]
    assert len(code) == 1 and len(code[0][1].splitlines()) <= 60
    model = yours["model"]
    before = [p.detach().clone() for p in model.parameters()]
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "reference": copy.deepcopy(model),
    }
    ran = run("README.md", yours | given, code)
    assert ran["report"].ok and ran["report"].compared == 6
    assert ran["rollout"] == ran["train"]
    assert ran["advantages"].abs().min() > 0
    for old, reference in zip(ran["old"], ran["ref"], strict=True):
        assert torch.equal(old, reference) and not old.requires_grad
    assert ran["out"].metrics["kl_ref"] > 0 and ran["out"].metrics["ratio"] != 1  # after a step
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2


def test_readme_on_trl(yours):
    pytest.importorskip("trl")
    (code,) = [block for block in blocks("README.md") if "from trl" in block[1]]
    assert issubclass(run("README.md", {}, [code])["PackedTrainer"], mp.adapters.trl.MmpackGRPO)


def test_loaders(yours, samples, capsys):
    pytest.importorskip("accelerate")
    train = samples
    optimizer = torch.optim.SGD(yours["model"].parameters(), lr=0.0)
    given = {"train": train, "advantages": torch.arange(6.0), "optimizer": optimizer}
    names = run("docs/loaders.md", yours | given)
    optimizer.zero_grad()
    assert names["again"] == train and names["batch"].pixel_values is not None
    printed = capsys.readouterr().out
    assert printed.startswith("1\ntorch.uint8 torch.Size([24, 1176])\ntorch.float32\n")
    assert "['s0', 's1', 's2', 's3', 's4', 's5'] torch.Size([39])" in printed
    assert "PackedBatch('qwen2_5_vl', samples=6, loss_tokens=39, media=2" in printed


def test_ranks(yours, samples, tmp_path, capsys):
    """On one rank."""
    distributed = torch.distributed
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        optimizer = torch.optim.SGD(yours["model"].parameters(), lr=0.0)
        given = {"train": samples, "advantages": torch.arange(6.0), "optimizer": optimizer}
        if not takes_encoded_media(yours["model"]):
            pytest.skip("transformers before 5.19")
        here = [block for block in blocks("docs/ranks.md") if "parallelize_module" not in block[1]]
        names = run("docs/ranks.md", yours | given, here)
    finally:
        distributed.destroy_process_group()
    optimizer.zero_grad()
    assert (names["total_tokens"], names["total_samples"]) == (39, 6)
    assert capsys.readouterr().out == "[48]\n"


@pytest.fixture
def samples(yours):
    processor = mp.wrap_processor(yours["hf_processor"])
    names = ("messages", "response_ids", "sample_id", "group_id")
    return [
        processor(**{n: r[n] for n in names}, rollout_logprobs=r["logprobs"])
        for r in yours["responses"]
    ]


def test_trace(yours, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = yours["responses"][0]
    asked = {"role": "user", "content": "How many?"}
    answered = {"role": "assistant", "content": "Two."}
    names = {
        "samples": samples,
        "messages": one["messages"],
        "logprobs": one["logprobs"],
        "image": one["images"][0],
        "input_ids": [*samples[0].input_ids.tolist(), *range(144)],
        "tool_ids": [1, 2],
        "more_ids": [3, EOS],
        "tool_messages": [{"role": "tool", "content": "2"}],
        "conversation": [asked, answered, asked, answered],
    }
    ran = run("docs/trace.md", yours | one | names)
    assert ran["problems"] == [] and mp.validate(ran["sample"]) == []
    assert len(ran["sample"].loss_spans) == 2


def test_trajectories(yours):
    processor = mp.wrap_processor(yours["hf_processor"])
    rng = np.random.default_rng(1)
    screens = [rng.integers(0, 256, (56, 84, 3), dtype=np.uint8) for _ in range(2)]
    ran = run("docs/trajectories.md", {"processor": processor, "screens": screens})
    assert len(ran["context"].media) == 1 and ran["context"].dropped
    assert mp.validate(ran["samples"]) == []


def test_records_of_others(yours):
    """Of the page of adapters: the others need their frameworks."""
    (code,) = [block for block in blocks("docs/adapters.md") if "skyrl" in block[1]]
    processor = mp.wrap_processor(yours["hf_processor"])
    assert run("docs/adapters.md", {"processor": processor}, [code])["episode"].group_id == "task"


def test_parity(samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rollout", "train"):
        mp.write_trace(f"{name}.jsonl", samples)
    assert run("docs/parity.md", {"mp": mp})["report"].ok


def test_packing_and_losses_and_the_gpu_s_page(yours, samples):
    model, batch = yours["model"], mp.pack(samples, share_prefix=True)
    ran = run("docs/packing.md", {"model": model, "batch": batch, "loss_of": torch.mean})
    names = {
        "mp": mp,
        "torch": torch,
        "samples": samples,
        "plan": mp.plan(samples, max_tokens=4096),
        "members": list(range(len(samples))),
        "batch": batch,
        "logprobs": ran["logprobs"].detach().requires_grad_(),
        "rewards": torch.arange(6.0),
        "group_index": batch.group_index,
    }
    assert run("docs/losses.md", names)["out"].loss.isfinite()
    hidden = torch.zeros(len(batch.input_ids), 8)
    head = torch.nn.Linear(8, model.config.get_text_config().vocab_size, bias=False)
    ran = run("docs/gpu.md", {"mp": mp, "hidden": hidden, "lm_head": head, "batch": batch})
    assert len(ran["logprobs"]) == len(ran["entropy"]) == batch.num_loss_tokens
    assert ran["mixed"].shape == (8, 4, 4)
    for parts, whole in (("merged", "out"), ("together", "lse")):
        assert (ran[parts] - ran[whole]).abs().max() <= 1e-5
    seen = batch.vision_rows.source >= 0
    assert ran["embeddings"][seen].any(1).all() and not ran["embeddings"][~seen].any()


def test_costs(yours, samples, capsys):
    for i, sample in enumerate(samples):
        sample.rewards = [mp.Score("helpful", float(i % 2)), mp.Score("exact", 1.0)]
        sample.costs = [mp.schema.Cost("harm", float(i == 3)), mp.schema.Cost("format", 0.0)]
    model = copy.deepcopy(yours["model"])

    def logprobs_of(batch):
        with attach(model):
            return packed_logprobs(model, batch)

    count = sum(sample.num_loss_tokens for sample in samples)
    names = {
        "mp": mp,
        "samples": samples,
        "group_index": torch.tensor([0, 0, 0, 1, 1, 1]),
        "logprobs_of": logprobs_of,
        "values": {name: torch.zeros(count) for name in ("helpful", "harm", "format")},
    }
    ran = run("docs/costs.md", names)
    assert ran["multiplier"].values["harm"] > 0 == ran["multiplier"].values["format"]
    assert ran["tokens"].shape == (count,) and "'harm': 0.1666" in capsys.readouterr().out
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_vla():
    episodes = list(mp.read_trace(ROOT / "fixtures/vla/chunks.jsonl"))
    old = mp.pack(episodes).loss_columns["rollout_logprobs"]
    names = {"mp": mp, "torch": torch, "episodes": episodes, "logprobs": old + 0.01}
    ran = run("docs/vla.md", names)
    assert ran["by_chunk"].metrics["ratio"] == pytest.approx(1.75, abs=0.01)
    assert ran["by_token"].metrics["ratio"] == pytest.approx(1.01, abs=0.001)


def test_pages_that_take_nothing(capsys):
    sample = run("docs/grounding.md", {})["sample"]
    assert mp.validate(sample) == [] and sample.rewards[0].value == 0.75
    assert capsys.readouterr().out.endswith("{'region': 0} 0.75\n")
    assert mp.validate(run("docs/actions.md", {})["sample"]) == []
    run("docs/install.md", {})
    run("docs/cli.md", {})
    assert capsys.readouterr().out == ""
    run("docs/probe.md", {})
    assert "v_proj" in capsys.readouterr().out
    ratios = run("docs/kept_ids.md", {})["ratios"]
    assert ratios["over the kept ids"] == pytest.approx(1.0, abs=1e-5)
    assert ratios["over all ids"] < 0.8
    drifts = run("docs/routes.md", {})["drifts"]
    assert list(drifts["not replayed"].causes) == ["routing"]
    assert drifts["replayed"].max_abs < drifts["not replayed"].max_abs / 20


def test_media_by_reference(samples, capsys):
    page = "docs/media_by_reference.md"  # the part on Ray: tests/adapters/test_ray_blobs.py
    here = [block for block in blocks(page) if "import ray" not in block[1]]
    ran = run(page, {"samples": samples}, here)
    assert ran["near"].stats.fetched == 2 and not ran["store"].folder.exists()
    assert torch.equal(ran["batch"].pixel_values, mp.pack(samples).pixel_values)
    assert capsys.readouterr().out == "None 2 media\n2 media fetched\n"


def test_failure(samples, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    samples[1].loss_spans = [mp.LossSpan(0, 2)]
    assert run("docs/failure.md", {"train": samples})["step"].total_samples == 5
    assert capsys.readouterr().out.endswith("1 left out\n1 {'MM202': 1}\n6 items\n")


def test_features(yours, samples):
    model = copy.deepcopy(yours["model"])
    if not takes_encoded_media(model):
        pytest.skip("transformers before 5.19")
    packs = [mp.pack(samples[:2]), mp.pack(samples[2:4], share_prefix=True)]
    names = {"torch": torch, "model": model, "packs": packs, "loss_of": torch.mean}
    ran = run("docs/features.md", names | {"optimizer": torch.optim.SGD(model.parameters(), lr=1)})
    assert ran["store"].stats.misses == 2 and ran["store"].stats.patches_saved > 0
    assert next(model.model.visual.parameters()).grad is not None


def test_cache(yours, samples):
    model = copy.deepcopy(yours["model"])
    if not takes_encoded_media(model):
        pytest.skip("transformers before 5.19")
    ran = run("docs/cache.md", {"model": model, "samples": samples})
    assert ran["predicted"][0] == 0 < ran["predicted"][1]
    assert ran["found"].cached_tokens > 0 and len(ran["layers"]) == 2


def test_memory(samples, capsys):
    names = {"model": tiny_qwen2_5_vl().train(), "samples": samples}
    ran = run("docs/memory.md", names)
    assert ran["plan"].stats["no_grad_ratio"] > 1
    assert "KeptLayers(layers=2, blocks=2" in capsys.readouterr().out
    assert all(p.grad is not None for p in ran["model"].get_decoder().parameters())


def test_planning(yours, samples, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    held = [Counts(1000 * k, 10**5 * k**3, loss_tokens=999 * (k % 3)) for k in range(1, 9)]
    names = {"samples": samples, "model": yours["model"]}
    ran = run("docs/planning.md", names | {"measured": [(c, 1e-6 * c.rows) for c in held]})
    assert ran["same"] == ran["plan"] and ran["plan"].total_samples == len(samples)
    assert ran["cost"] == ran["found"].cost and ran["cost"].calibrated
    printed = capsys.readouterr().out
    assert printed.startswith("Plan(bins=") and "8 steps: seconds of a step are off by" in printed


def test_speed():
    sample = make_sample([("text", range(5)), ("response", [1, 2, 3])], "a")
    names = {"model": tiny_qwen2_5_vl(), "batch": mp.pack([sample]), "made_up": mp.pack([sample])}
    with torch.compiler.set_stance("force_eager"):
        assert run("docs/speed.md", names)["logprobs"].shape == (3,)


def test_view(samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mp.write_trace("rollout.jsonl", samples)
    (tmp_path / "screens").mkdir()
    ran = run("docs/view.md", {"tokenizer": lambda token_id: f"{token_id} ".encode()})
    assert all(f'aria-label="sample s{i}"' in ran["page"] for i in range(6))
    assert ran["figure"].startswith(b"\x89PNG")


def test_invariant(yours, samples, capsys):
    run("docs/invariant.md", {"model": yours["model"], "samples": samples})
    assert capsys.readouterr().out == "True\nTrue\n"
    assert not is_on()


def test_the_page_of_teachers(yours, samples, capsys):
    rng = np.random.default_rng(0)
    for k, sample in enumerate(samples):
        ids = [np.sort(rng.choice(1000, 4, replace=False)) for _ in sample.loss_indices]
        scores = [np.log(rng.dirichlet(np.ones(5))[:4]) for _ in ids]
        sample.teachers = {("maths", "code")[k % 2]: mp.schema.Ragged.of(ids, scores)}
    given = {"model": yours["model"], "samples": samples, "advantages": torch.arange(6.0)}
    names = run("docs/teachers.md", given)
    yours["model"].zero_grad()
    first, *_, last = names["divergences"]
    assert 0 < last < first / 3
    assert capsys.readouterr().out == f"{first:.2f} to {last:.2f} nats\n"
    assert set(names["distilled"].metrics) >= {"maths/divergence", "code/divergence"}
    assert names["advantages"].shape == (200,)


def test_sequence_parallel(yours, samples, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        names = {
            "model": yours["model"],
            "samples": samples,
            "advantages": torch.ones(len(samples)),
        }
        assert run("docs/sequence_parallel.md", names)["out"].loss.isfinite()
    finally:
        torch.distributed.destroy_process_group()
