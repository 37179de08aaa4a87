"""The chain on tiny models: every axis within the contract, planted faults at their stage, and its oracle."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
import torch
from chain.compare import Equal
from chain.job import AXES, ONE_PROCESS, Options, chain
from chain.job.prepare import prepare
from chain.job.samples import draw
from chain.passes.axes import axes_here, padded_alone, reference
from chain.passes.exact import exact_copy, exact_logprobs
from chain.passes.run import Way, run
from chain.report import ChainReport
from chain.stages import STAGES, TOWER
from support.process import call_mmpack

from benchmarks.step.kinds import parts_of_weight
from mmpack.adapters.transformers.tower import takes_encoded_media
from mmpack.errors import ArgumentError

MODELS = ["qwen2.5-vl", "qwen3-vl"]
CPU = torch.device("cpu")
program = importlib.import_module("chain.__main__")
tree_attention = importlib.import_module("mmpack.ops.attention.tree_attention")
prepared = {}
walked = {}


def the(model):
    if model not in prepared:
        prepared[model] = prepare(Options(model), CPU)
    return prepared[model]


@pytest.fixture(params=[MODELS[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:])])
def made(request):
    return the(request.param)


def rows_of(made, axis, value, record=None, equal=None):
    if record is None:
        record = axes_here(made.model)[axis][value](made.model, made.problem)
    rows = made.rows(axis, value, record, equal or Equal())
    return {(row.stage, row.kind or row.direction): row for row in rows}


def every_row(made):
    """Of each layout that runs here, its rows: (axis, value) -> rows. Walked once."""
    if made.model not in walked:
        walked[made.model] = {
            (axis, value): rows_of(made, axis, value)
            for axis, values in axes_here(made.model).items()
            for value in values
        }
    return walked[made.model]


# -- what is healthy ---------------------------------------------------------------------------------------------------


@pytest.mark.adapter
def test_every_axis_is_within_the_contract(made):
    """All stages have numbers in every layout that runs them, and none is beyond."""
    for (axis, value), rows in every_row(made).items():
        assert all(row.within for row in rows.values()), [r for r in rows.values() if not r.within]
        idle = {key for key, row in rows.items() if row.not_run}
        if axis == "prefix_cache":
            expected = {(s, d) for s in STAGES for d in ("forward", "backward")
                        if d == "backward" or s in TOWER}  # fmt: skip
        elif value == "store":
            expected = {(s, d) for s in TOWER for d in ("forward", "backward")}
        else:
            expected = set()
        assert idle == expected, (axis, value)
        if axis == "prefix_cache":
            continue
        kinds = {row.kind for row in rows.values()} - {""}
        wanted = {k for n, g in made.reference.parameters.items() for k in parts_of_weight(n, g)}
        if value == "store":
            wanted = {kind for kind in wanted if not kind.startswith("visual.")}
        assert kinds == wanted and len(kinds) >= 14, (axis, value)


def test_what_is_equal_in_every_layout(made):
    """Bits that no layout changes, whatever the products' tiles are: embeddings, and features that are read again."""
    for place, rows in every_row(made).items():
        assert rows["embedding", "forward"].equal, place
    again = rows_of(made, "batch", "1", reference(made.model, made.problem))
    assert all(row.equal and row.ulps == 0 and row.max_difference == 0 for row in again.values())
    if takes_encoded_media(made.model):
        stored = rows_of(made, "feature_cache", "store")
        assert all(row.equal for row in stored.values() if not row.not_run)


def test_transformers_own_attention_is_held_to_itself_alone(made):
    """Its errors are not ours: a model whose own layers round more is no fault of a layout."""
    beside_none = dataclasses.replace(made, reference=None)
    own = beside_none.rows("padding", "left, own attention", made.own, Equal())
    assert all(row.equal and row.reference_error == row.error for row in own)


def test_a_cached_prefix_leaves_its_rows_out(made):
    if not takes_encoded_media(made.model):
        pytest.skip("this transformers takes no encoded media")
    record = axes_here(made.model)["prefix_cache"]["on"](made.model, made.problem)
    at = record.cells["embedding", "language_model.embed_tokens"].at
    first = made.problem.tokens
    for i, sample in enumerate(made.problem.samples):
        own = at[(at >= first[i]) & (at < first[i + 1])]
        start = sample.loss_spans[0].start
        assert len(own) == len(sample) - (start - 1) // 4 * 4 < len(sample)


def test_the_processors_cache_is_on_and_off():
    """The same pixels, the second time from the cache: samples a0 and a1 have one picture."""
    cached, uncached, companions = draw("qwen3_vl", "tiny")
    assert [len(c.media) for c in companions] == [0, 1, 3]
    a, b = cached[0].media[0], cached[1].media[0]
    assert a.pixel_values is b.pixel_values
    c, d = uncached[0].media[0], uncached[1].media[0]
    assert c.pixel_values is not d.pixel_values
    assert np.array_equal(a.pixel_values, c.pixel_values) and a.cache_key == d.cache_key


@pytest.mark.slow
def test_bfloat16_is_measured_against_float64():
    report = chain(Options(dtype="bfloat16", axes=["packed", "shared"]))
    assert report.ok, list(report.lines())
    rows = {(r.value, r.stage, r.direction): r for r in report.rows if not r.kind}
    row = rows["in order", "mlp", "forward"]
    assert 1e-4 < row.reference_error < row.allowed < 2e-2
    assert rows["in order", "embedding", "forward"].equal


# -- the oracle --------------------------------------------------------------------------------------------------------


def test_values_of_each_stage_beside_float64(made):
    """The reference, in float32 by mmpack's attention and head, beside transformers' own in float64."""
    assert made.exact.cells.keys() == made.reference.cells.keys()
    for key, cells in made.exact.cells.items():
        other = made.reference.cells[key]
        for a, b in ((other.values, cells.values), (other.gradient, cells.gradient)):
            if a is not None:
                a, b = a.double(), b.double()
                scale = max(float(b.norm()), 0.1 if key[0] in ("kl", "loss") else 0)
                assert float((a - b).norm()) <= 1e-5 * scale, key
    assert made.exact.parameters.keys() == made.reference.parameters.keys()


def test_the_exact_copy_is_float64_throughout(made):
    """Its logprobs are what the float32 model's weights give when everything is computed in float64 by hand."""
    wide = exact_copy(made.model, torch.float64)
    part = padded_alone(wide, made.problem)[3]  # text only
    with torch.no_grad():
        found = exact_logprobs(wide, part.batch)
        again = exact_logprobs(exact_copy(wide, torch.float64), part.batch)
    assert found.dtype == torch.float64 and torch.equal(found, again)
    record = run(wide, made.problem, padded_alone(wide, made.problem),
                 Way(attached=False, logprobs=exact_logprobs))  # fmt: skip
    for (stage, place), cells in record.cells.items():
        if stage not in ("kl", "loss"):  # whose values are float32 by contract
            assert cells.values.dtype == torch.float64, (stage, place)


def test_gradients_are_autograds(made):
    """Of the last norm's output, by hand: the head's product of the probabilities' gradient."""
    problem, model = made.problem, made.model
    place = ("head", "lm_head")
    found = made.reference.cells[place]
    slope = made.reference.cells["loss", "loss"].gradient[:, 0].double()
    norm = made.reference.cells["rms_norm", "language_model.norm"]
    first, start = problem.tokens, 0
    for i, sample in enumerate(problem.samples):
        rows = first[i] + torch.tensor(list(sample.loss_indices)) - 1
        hidden = norm.values[rows].double().requires_grad_()
        logprobs = (hidden @ model.lm_head.weight.double().T).log_softmax(-1)
        targets = torch.tensor(sample.input_ids[list(sample.loss_indices)])
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        (chosen * slope[start : start + len(rows)]).sum().backward()
        here = (found.at >= start) & (found.at < start + 8)
        here &= found.at < start + len(rows)
        mine = found.gradient[found.group[here]].double()
        wanted = hidden.grad[: len(mine)].detach()
        assert float((mine - wanted).norm()) <= 1e-5 * float(wanted.norm())
        start += len(rows)


# -- planted differences -----------------------------------------------------------------------------------------------


def scaled(factor):
    def hook(module, args, output):
        return output * factor

    return hook


PLANTED = {  # in the last layer, or behind the layers: module, and the first stage that shows it
    "visual.blocks.1": "tower",
    "visual.merger": "projector",
    "language_model.layers.1.self_attn.v_proj": "qkv",
    "language_model.layers.1.self_attn.o_proj": "o",
    "language_model.layers.1.mlp.down_proj": "mlp",
    "language_model.norm": "rms_norm",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("module, stage", PLANTED.items())
def test_a_planted_difference_is_named(made, module, stage):
    """Its stage is the first beyond the contract, forward; what runs before it in that layer is untouched."""
    found = made.model.model.get_submodule(module)
    # before the tape's own hook, as a broken kernel is
    handle = found.register_forward_hook(scaled(1 + 1e-3), prepend=True)
    try:
        record = axes_here(made.model)["packed"]["in order"](made.model, made.problem)
    finally:
        handle.remove()
    beyond = [key for key in record.cells if off(record, made, key)]
    order = list(record.cells)
    assert (stage, module) in beyond
    first = min(order.index(key) for key in beyond)
    text = [k for k in order if k[0] not in TOWER]
    if stage in TOWER:
        assert order.index((stage, module)) == first
        return
    assert text.index((stage, module)) == min(text.index(k) for k in beyond)
    assert {"head", "logprob", "ratio", "loss"} <= {key[0] for key in beyond}
    rows = rows_of(made, "packed", "in order", record)
    assert all(rows[s, "forward"].within for s in (*TOWER, "embedding", "merge"))
    assert not rows[stage, "forward"].within and rows[stage, "forward"].place == module


def off(record, made, key):
    """Whether a place's values, all of which are there, are further from the exact ones than the reference's may be."""
    mine, theirs, true = (values_by_row(r.cells[key]) for r in (record, made.reference, made.exact))
    size = float(true.norm()) or 1.0
    error, allowed = (float((x - true).norm()) / size for x in (mine, theirs))
    return error > max(1.5 * allowed, 1e-5)


def values_by_row(cells):
    out = torch.zeros(int(cells.at.max()) + 1, cells.values.shape[1], dtype=torch.float64)
    return out.index_copy(0, cells.at, cells.values.double())


def test_a_difference_of_the_backward_only(made):
    """A gradient that is scaled in the last layer's output product: forward within, backward beyond from there on."""
    layer = made.model.model.get_submodule("language_model.layers.1.self_attn.o_proj")

    def hook(module, args, output):
        out = output.clone()
        out.register_hook(lambda gradient: gradient * 1.001)
        return out

    handle = layer.register_forward_hook(hook, prepend=True)
    try:
        rows = rows_of(made, "packed", "in order")
    finally:
        handle.remove()
    assert all(row.within for (_, direction), row in rows.items() if direction == "forward")
    beyond = {stage for (stage, d), row in rows.items() if d == "backward" and not row.within}
    assert "attention" in beyond and not beyond & {"head", "logprob", "ratio", "kl", "loss"}


QKV = "model.visual.blocks.1.attn.qkv"
DQ = "visual.blocks.*.attn.qkv.weight[q]"


@pytest.fixture(scope="module")
def packed():
    """Gradients of a healthy run; a test takes a copy of those that it changes."""
    made = the(MODELS[0])
    return made, axes_here(made.model)["packed"]["in order"](made.model, made.problem)


def with_wrong_dq(record, factor):
    """The record with the first third of one layer's fused gradient scaled."""
    whole = record.parameters[f"{QKV}.weight"].clone()
    whole[: len(whole) // 3] *= factor
    return dataclasses.replace(record, parameters=record.parameters | {f"{QKV}.weight": whole})


@pytest.mark.parametrize("factor", [1.3, 0.0, float("nan"), float("inf")])
def test_a_wrong_dq_of_the_tower_is_named(packed, factor):
    made, record = packed
    rows = rows_of(made, "packed", "in order", with_wrong_dq(record, factor))
    assert {key for key, row in rows.items() if not row.within} == {
        ("tower", "weights"),
        ("tower", DQ),
    }
    for key in (("tower", "weights"), ("tower", DQ)):
        assert rows[key].place == f"{QKV}.weight"
    assert rows["tower", DQ].cells[2] == DQ and "BEYOND" in rows["tower", DQ].cells[-1]
    printed = [cells[2] for cells in ChainReport({}, [*rows.values()]).table(every_kind=False)[1]]
    assert [name for name in printed if "." in name] == [DQ]


def test_a_fault_that_the_norm_of_all_hides(packed):
    """A third of the tower's bound of all its weights is many times the bound of one kind."""
    made, record = packed
    rows = rows_of(made, "packed", "in order", record)
    name = f"{QKV}.bias"
    true = {n: g for n, g in made.exact.parameters.items() if n.startswith("model.visual.blocks")}
    size = sum(float(g.norm()) ** 2 for g in true.values()) ** 0.5
    of_kind = float(true[name].chunk(3)[0].norm())
    whole = record.parameters[name].clone()
    whole[: len(whole) // 3] *= 1 + 0.3 * rows["tower", "weights"].allowed * size / of_kind
    wrong = dataclasses.replace(record, parameters=record.parameters | {name: whole})
    rows = rows_of(made, "packed", "in order", wrong)
    beyond = [key for key, row in rows.items() if not row.within]
    assert beyond == [("tower", "visual.blocks.*.attn.qkv.bias[q]")]
    report = ChainReport({}, list(rows.values()))
    assert not report.ok
    assert f"first beyond at {beyond[0][1]}, weights ({name})" in list(report.lines())[1]


def test_what_must_be_equal_and_is_not(made):
    """A bound of 0: one step of one value is beyond it."""
    record = reference(made.model, made.problem)
    everything = Equal(frozenset(STAGES), frozenset(STAGES))
    assert all(r.within for r in rows_of(made, "batch", "1", record, everything).values())
    key = ("rotary", "language_model.layers.0.rotary.q")
    value = record.cells[key].values
    value[3, 5] = torch.nextafter(value[3, 5], torch.tensor(9.0))
    rows = rows_of(made, "batch", "1", record, everything)
    assert {key for key, row in rows.items() if not row.within} == {("rotary", "forward")}
    row = rows["rotary", "forward"]
    assert row.ulps == 1 and row.allowed == 0 and row.place == key[1]
    assert rows_of(made, "batch", "1", record)["rotary", "forward"].within  # bounded


def test_a_value_that_is_no_number_is_beyond(made):
    record = reference(made.model, made.problem)
    record.cells["o", "language_model.layers.0.self_attn.o_proj"].values[0, 0] = float("nan")
    assert not rows_of(made, "batch", "1", record)["o", "forward"].within


@pytest.mark.slow
def test_a_fault_of_every_layout_is_beyond(monkeypatch):
    """What mmpack's attention is off in each layout alike, the reference is off too."""
    own = tree_attention._attend

    def steeper(name, q, k, v, seen, plan, scale, *rest, **more):
        return own(name, q, k, v, seen, plan, 1.01 * (scale or q.shape[-1] ** -0.5), *rest, **more)

    monkeypatch.setattr(tree_attention, "_attend", steeper)
    report = chain(Options(axes=["packed"]))
    beyond = {(r.stage, r.direction) for r in report.beyond if r.axis == "alone"}
    assert not report.ok and ("attention", "forward") in beyond
    assert not beyond & {("tower", "forward"), ("merge", "forward")}


def without(kind, record):
    """The record with something of the second layer left out; the stage and direction that lack it."""
    key = "mlp", "language_model.layers.1.mlp.down_proj"
    cells = record.cells[key]
    if kind == "a place":
        del record.cells[key]
    elif kind == "a row":
        keep = torch.arange(len(cells.at)) != 5
        cells.values, cells.at, cells.group = cells.values[keep], cells.at[keep], cells.group[keep]
    elif kind == "rows":
        cells.values, cells.at = cells.values[:0], cells.at[:0]
    elif kind == "a gradient":
        cells.gradient = None
        return key[0], "backward"
    else:
        del record.parameters["model.language_model.layers.1.mlp.down_proj.weight"]
        return key[0], "weights"
    return key[0], "forward"


@pytest.mark.parametrize("kind", ["a place", "a row", "rows", "a gradient", "a weight's gradient"])
def test_what_a_run_lacks_is_beyond(made, kind):
    record = axes_here(made.model)["packed"]["in order"](made.model, made.problem)
    stage, direction = without(kind, record)
    rows = rows_of(made, "packed", "in order", record)
    row = rows[stage, direction]
    assert not row.within and "layers.1.mlp.down_proj" in row.place and "BEYOND" in row.cells[-1]
    if direction == "weights":
        beyond = {kind for (_, kind), row in rows.items() if not row.within}
        assert beyond == {"weights", "layers.*.mlp.down_proj.weight"}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    out, html = tmp_path / "chain.json", tmp_path / "chain.html"
    asked = ["--axis", "packed", "--axis", "processor_cache", "--out", out, "--html", html]
    done = call_mmpack(*asked, main=program.main)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["ok"] and document["setting"]["model"] == "qwen2.5-vl"
    assert {row["axis"] for row in document["rows"]} == {
        "alone",
        "packed",
        "processor_cache",
    }
    assert {row["stage"] for row in document["rows"]} == set(STAGES)
    assert "OK: " in done.stdout and "qkv" in done.stdout
    page = html.read_text()
    assert "packed reversed" in page and "<script" not in page
    assert DQ in page and any(row.get("kind") == DQ for row in document["rows"])
    assert "visual." not in done.stdout and "--out and --html show all" in done.stdout


@pytest.mark.parametrize(
    "args, said",
    [
        (["--model", "gpt"], "model is 'gpt'. Fix: use one of qwen2.5-vl, qwen3-vl, qwen3.5"),
        (["--axis", "moon"], f"axis is 'moon'. Fix: use one of {', '.join(AXES)}"),
        (["--dtype", "int8"], "dtype is 'int8'. Fix: use one of float32, bfloat16"),
        (["--device", "abacus"], "device is 'abacus'. Fix: use 'cpu' or 'cuda'"),
        (["--tp", "3"], "which 3 ranks don't divide"),
        (["--layers", "0"], "layers"),
    ],
)
def test_what_the_command_refuses(args, said):
    done = call_mmpack(*args, main=program.main)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_exit_1_beyond_the_contract(monkeypatch):
    from chain import compare as compared

    monkeypatch.setattr(compared, "parameter_gradient_bound", lambda *_, **__: 1e-12)
    done = call_mmpack("--axis", "packed", "--json", main=program.main)
    document = json.loads(done.stdout)
    assert done.returncode == 1 and not document["ok"]


def test_options():
    assert set(ONE_PROCESS) < set(AXES)
    with pytest.raises(ArgumentError, match=r"size is 'huge'.*Fix: use one of tiny, layer"):
        Options(size="huge")
