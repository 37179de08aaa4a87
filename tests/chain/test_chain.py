"""The chain on tiny models: every layout within the contract, planted faults at their stage, and its oracle."""

import importlib
import json

import pytest
import torch
from chain.__main__ import main
from chain.layouts import alone, exact_copy, exact_logprobs, layouts, prepare
from chain.step import Cells
from chain.tape import STAGES, TOWER
from support.benchmarks import benchmark

from benchmarks.step.kinds import parts_of_weight
from mmpack.packing.pad import pad

BENCH = benchmark("chain")
tree_attention = importlib.import_module("mmpack.ops.attention.tree_attention")
MODELS = ["qwen2.5-vl", "qwen3-vl"]
DOWN = "language_model.layers.1.mlp.down_proj"
QKV = "model.visual.blocks.1.attn.qkv"
DQ = "visual.blocks.*.attn.qkv.weight[q]"


@pytest.fixture(scope="module")
def made():
    return prepare()


@pytest.fixture
def packed(made):
    """A healthy run, that a test may change."""
    return made.take(parts_of(made, "in order"))


def parts_of(made, value):
    return next(parts for _, name, parts in layouts(made.problem) if name == value)


def beyond(made, record, axis="packed"):
    rows = made.rows(axis, "", record)
    return {(row.stage, row.kind or row.direction): row for row in rows if not row.within}


# -- what is healthy ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.adapter
@pytest.mark.parametrize(
    "model, invariant", [(MODELS[0], False), (MODELS[1], True), (MODELS[1], False)]
)
def test_every_layout_is_within_the_contract(made, model, invariant):
    """All stages have numbers in every layout, none is beyond, and embeddings are equal bits; the rest in the mode."""
    chain = made if (model, invariant) == (MODELS[0], False) else prepare(model, invariant=invariant)  # fmt: skip
    rows = chain.every_row()
    assert not [row for row in rows if not row.within]
    kinds = {k for n, g in chain.reference.parameters.items() for k in parts_of_weight(n, g)}
    assert len(kinds) >= 14
    for place in {(row.axis, row.value) for row in rows}:
        here = [row for row in rows if (row.axis, row.value) == place]
        ways = {(row.stage, row.direction) for row in here if not row.kind}
        assert {s for s, way in ways if way == "forward"} == set(STAGES)
        assert {s for s, way in ways if way == "backward"} == set(STAGES) - {"head", "loss"}
        assert {row.kind for row in here} - {""} == kinds
    for row in rows:
        if row.axis != "alone" and invariant:
            forward = row.direction == "forward" and row.stage != "loss"
            backward = row.direction == "backward" and row.stage not in TOWER
            if forward or (backward and row.axis != "shared"):
                assert row.equal and row.allowed == 0, row
        elif (row.stage, row.direction) == ("embedding", "forward"):
            assert row.equal, row
    if not invariant:
        assert any(not r.equal for r in rows if (r.stage, r.axis) == ("qkv", "packed"))
    again = chain.rows("again", "", chain.take(alone(chain.problem)))
    assert all(row.equal and row.max_difference == 0 for row in again)


@pytest.mark.slow
def test_bfloat16_is_measured_against_float64():
    rows = prepare(dtype="bfloat16").every_row()
    assert all(row.within for row in rows)
    row = next(r for r in rows if (r.axis, r.stage, r.direction) == ("packed", "mlp", "forward"))
    assert 1e-4 < row.reference_error < row.allowed < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["tiny", pytest.param("layer", marks=pytest.mark.alone)])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu(model, size, invariant):
    rows = prepare(model, size, "bfloat16", "cuda", invariant).every_row()
    assert not [row for row in rows if not row.within]
    assert torch.cuda.max_memory_allocated() < 60e9


# -- the oracle --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_of_each_stage_beside_float64(made):
    """The reference, in float32 by mmpack's attention and head, beside transformers' own in float64."""
    assert made.exact.cells.keys() == made.reference.cells.keys()
    for key, cells in made.exact.cells.items():
        other = made.reference.cells[key]
        if key[0] not in ("kl", "loss"):  # whose values are float32 by contract
            assert cells.values.dtype == torch.float64, key
        for a, b in ((other.values, cells.values), (other.gradient, cells.gradient)):
            if b is not None:
                scale = max(float(b.norm()), 0.1 if key[0] in ("kl", "loss") else 0)
                assert float((a.double() - b.double()).norm()) <= 1e-5 * scale, key
    assert made.exact.parameters.keys() == made.reference.parameters.keys()
    wide = exact_copy(made.model, torch.float64)
    batch = alone(made.problem, pad)[3].batch
    with torch.no_grad():
        twice = exact_logprobs(exact_copy(wide, torch.float64), batch)
        assert torch.equal(twice, exact_logprobs(wide, batch))


# -- planted differences -----------------------------------------------------------------------------------------------

PLANTED = {  # module, and the stage that shows it first
    "visual.blocks.1": "tower",
    "visual.merger": "projector",
    "language_model.layers.1.self_attn.v_proj": "qkv",
    "language_model.layers.1.self_attn.o_proj": "o",
    DOWN: "mlp",
    "language_model.norm": "rms_norm",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("module, stage", PLANTED.items())
def test_a_planted_difference_is_named(made, module, stage):
    """Its stage is beyond the contract at that module, forward; what runs before it is untouched."""
    found = made.model.model.get_submodule(module)
    # before the tape's own hook, as a broken kernel is
    handle = found.register_forward_hook(lambda _, __, out: out * (1 + 1e-3), prepend=True)
    try:
        rows = beyond(made, made.take(parts_of(made, "in order")))
    finally:
        handle.remove()
    assert rows[stage, "forward"].place == module
    assert {(s, "forward") for s in ("logprob", "ratio")} <= rows.keys()
    before = {"tower": (), "projector": TOWER[:1]}.get(stage, (*TOWER, "embedding", "merge"))
    assert not {(s, "forward") for s in before} & rows.keys()


@pytest.mark.parametrize("factor", [1.3, float("nan")])
@pytest.mark.slow
def test_a_wrong_dq_of_the_tower_is_named(made, packed, factor):
    """The first third of one layer's fused gradient."""
    whole = packed.parameters[f"{QKV}.weight"]
    whole[: len(whole) // 3] *= factor
    rows = beyond(made, packed)
    assert rows.keys() == {("tower", "weights"), ("tower", DQ)}
    assert {row.place for row in rows.values()} == {f"{QKV}.weight"}


@pytest.mark.parametrize("kind", ["a place", "a row", "a gradient", "a weight"])
@pytest.mark.slow
def test_what_a_run_lacks_is_beyond(made, packed, kind):
    key, way = ("mlp", DOWN), "forward"
    if kind == "a place":
        del packed.cells[key]
    elif kind == "a row":
        packed.cells[key].values[5] = torch.nan
    elif kind == "a gradient":
        packed.cells[key], way = Cells(packed.cells[key].values, packed.cells[key].of), "backward"
    else:
        del packed.parameters[f"model.{DOWN}.weight"]
        way = "weights"
    rows = beyond(made, packed)
    assert DOWN in rows["mlp", way].place
    if kind == "a weight":
        assert rows.keys() == {("mlp", "weights"), ("mlp", "layers.*.mlp.down_proj.weight")}


# -- the command and its benchmark -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_and_the_benchmarks_rows(made, monkeypatch, tmp_path, capsys):
    program = importlib.import_module("chain.__main__")
    monkeypatch.setattr(program, "prepare", lambda **_: made)
    some = [layout for layout in layouts(made.problem) if layout[0] == "packed"]
    monkeypatch.setattr(importlib.import_module("chain.layouts"), "layouts", lambda _: some)
    healthy, off = tmp_path / "0-1.json", tmp_path / "1-1.json"
    assert main(["--out", str(healthy)]) == 0
    assert "0 beyond" in capsys.readouterr().out
    handle = made.model.model.get_submodule(DOWN).register_forward_hook(lambda _, __, x: x * 1.01)
    try:
        assert main(["--out", str(off)]) == 1
    finally:
        handle.remove()
    assert f"BEYOND packed in order: mlp forward ({DOWN})" in capsys.readouterr().out

    rows = json.loads(healthy.read_text())["rows"]
    table = {(r["stage"], r["pass"], r["kind"] or ""): r for r in BENCH.by_stage(rows)}
    assert table["embedding", "forward", ""]["packed"] == "equal"
    own = [r for r in rows if (r["axis"], r["kind"]) == ("packed", DQ)]
    assert len(own) == 2 and table["tower", "weights", DQ]["packed"] == {
        "diff": max(r["max_difference"] for r in own),
        "ulps": max(r["peak_ulps"] for r in own),
        "of bound": max(r["error"] / r["allowed"] for r in own),
    }
    run_ = BENCH.Run("qwen2.5-vl", False)
    first, *_ = BENCH.rows_of(run_, 1, off, "", 2.0)
    assert first["beyond"] > 0 and first["rows"] == len(rows) and first["device"] == "cpu"
    assert "did_not_run" in BENCH.rows_of(run_, 7, off, "no such card", 2.0)[0]
