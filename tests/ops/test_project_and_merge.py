"""project_and_merge on the torch path: a linear layer and transformers' masked_scatter, by float64 autograd."""

import pytest
import torch
from support.gathers import merged_as_transformers_does, some_vision
from torch.nn.functional import linear

import mmpack as mp
from mmpack.contracts import TOLERANCES, gradient_fp32_bound

CPU = torch.device("cpu")
SIZES, RUNS = [3, 4, 2, 5], [0, 1, 0, 0, 2, 1]  # the last medium is nowhere
TOTAL = sum(SIZES)


def layer(rows, depth, width, dtype=torch.float32, bias=True):
    """Random; values of a linear layer's size."""
    parts = torch.randn(rows, depth), torch.randn(width, depth) / depth**0.5, torch.randn(width)
    parts = [x.to(dtype).requires_grad_() for x in parts]
    return mp.Projection(*parts[: 3 if bias else 2])


def tensors(layers):
    return [x for p in layers for x in p if x is not None]


def by_torch(embeddings, projector, vision, levels=()):
    """The layers as transformers runs them, and its merge."""
    features, *deep = (linear(*p).to(embeddings.dtype) for p in (projector, *levels))
    return merged_as_transformers_does(embeddings, features, vision, deep)


def outputs_and_gradients(run, embeddings, layers, vision, weights):
    merged, taken = run(embeddings, layers[0], vision, layers[1:])
    out = [merged, *taken]
    grads = torch.autograd.grad(out, [embeddings, *tensors(layers)], weights)
    return [x.detach() for x in out], grads


def in_float64(embeddings, layers):
    wide = embeddings.detach().double().requires_grad_()
    return wide, [
        mp.Projection(*(None if x is None else x.detach().double().requires_grad_() for x in p))
        for p in layers
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(levels, dtype, bias):
    vision = some_vision(CPU, SIZES, RUNS, gap=2, tail=5)
    embeddings = torch.randn(len(vision.source), 88).to(dtype).requires_grad_()
    layers = [layer(TOTAL, 60 + i, 88, dtype, bias) for i in range(1 + levels)]
    weights = [torch.randn_like(embeddings)]
    weights += [torch.randn(len(vision.rows), 88).to(dtype) for _ in range(levels)]
    found = outputs_and_gradients(mp.project_and_merge, embeddings, layers, vision, weights)
    torchs = outputs_and_gradients(by_torch, embeddings, layers, vision, weights)
    wide, wide_layers = in_float64(embeddings, layers)
    expected = outputs_and_gradients(
        by_torch, wide, wide_layers, vision, [w.double() for w in weights]
    )
    assert len(found[0]) == 1 + levels
    errors = []  # relative, ours and torch's
    for ours, theirs, exact in zip(
        [*found[0], *found[1]], [*torchs[0], *torchs[1]], [*expected[0], *expected[1]], strict=True
    ):
        assert ours.dtype == dtype and ours.shape == exact.shape
        norm = exact.norm()
        errors.append([float((x.double() - exact).norm() / norm) for x in (ours, theirs)])
        if dtype == torch.bfloat16:
            assert errors[-1][0] <= TOLERANCES["gradient_bf16"].value
        else:
            bound = gradient_fp32_bound(exact.abs().max()) if dtype == torch.float32 else 1e-12
            assert (ours.double() - exact).abs().max() <= bound
    if (
        dtype == torch.bfloat16
    ):  # of all together: a bias alone has too few numbers for a share of an error
        off, torchs_off = torch.tensor(errors).norm(dim=0)
        assert off <= TOLERANCES["gradient_vs_torch"].value * torchs_off
    text = vision.source < 0
    assert torch.equal(found[0][0][text], embeddings[text])
    assert torch.equal(found[1][0], torch.where(text[:, None], weights[0], 0))
    assert not any(g[TOTAL - 5 :].any() for g in found[1][1 :: 2 + bias])  # of the unused medium


def test_gradients_by_differences():
    vision = some_vision(CPU, [2, 1], [0, 1, 0], gap=1)
    parts = [layer(3, 2, 3, torch.float64) for _ in range(2)]
    embeddings = torch.randn(len(vision.source), 3, dtype=torch.float64, requires_grad=True)

    def run(embeddings, *flat):
        merged, taken = mp.project_and_merge(
            embeddings, mp.Projection(*flat[:3]), vision, [mp.Projection(*flat[3:])]
        )
        return merged, *taken

    assert torch.autograd.gradcheck(run, (embeddings, *tensors(parts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 33])
def test_company_changes_nothing(dtype, width):
    """Rows and their gradients are the same bits whatever else is packed with a medium."""
    inputs, weight, bias = layer(70, 40, width, dtype)
    made = []
    for sizes in ([70], [130, 70], [1, 70, 9]):
        at = sizes.index(70)
        before, after = sum(sizes[:at]), sum(sizes[at + 1 :])
        around = [torch.randn(n, 40).to(dtype) for n in (before, after)]
        whole = torch.cat([around[0], inputs.detach(), around[1]]).requires_grad_()
        vision = some_vision(CPU, sizes, list(range(len(sizes))), gap=1)
        embeddings = torch.zeros(len(vision.source), width, dtype=dtype)
        merged, _ = mp.project_and_merge(embeddings, mp.Projection(whole, weight, bias), vision)
        rows = (vision.source >= before) & (vision.source < before + 70)
        up = torch.zeros_like(merged)
        up[rows] = torch.linspace(-1, 1, 70 * width).view(70, width).to(dtype)
        (grad,) = torch.autograd.grad(merged, whole, up)
        made.append((merged[rows].detach(), grad[before : before + 70]))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.parametrize("frozen", ["embeddings", "inputs", "weight", "bias"])
def test_what_is_frozen_has_no_gradient(frozen):
    vision = some_vision(CPU, SIZES, RUNS, gap=1)
    parts = layer(TOTAL, 6, 4)._asdict()
    parts["embeddings"] = torch.randn(len(vision.source), 4, requires_grad=True)
    parts[frozen].requires_grad_(False)
    own = mp.Projection(*(parts[name] for name in mp.Projection._fields))
    mp.project_and_merge(parts["embeddings"], own, vision)[0].sum().backward()
    for name, x in parts.items():
        assert (x.grad is None) == (name == frozen)


def test_features_are_written_in_the_dtype_of_the_embeddings():
    """As transformers' `features.to(inputs_embeds.dtype)`."""
    vision = some_vision(CPU, SIZES, RUNS, gap=1)
    own = layer(TOTAL, 6, 4, torch.bfloat16)
    embeddings = torch.zeros(len(vision.source), 4, requires_grad=True)
    merged, _ = mp.project_and_merge(embeddings, own, vision)
    assert merged.dtype == torch.float32
    assert torch.equal(merged, merged.bfloat16().float())
    merged.sum().backward()
    assert own.weight.grad.dtype == torch.bfloat16


def test_autocast_casts_as_a_linear_layer():
    vision = some_vision(CPU, SIZES, RUNS, gap=1)
    own = layer(TOTAL, 6, 4)
    embeddings = torch.zeros(len(vision.source), 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        merged, _ = mp.project_and_merge(embeddings, own, vision)
        expected, _ = by_torch(embeddings, own, vision)
    assert (merged - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert torch.equal(merged, merged.bfloat16().float())
    merged.sum().backward()
    assert own.weight.grad.dtype == torch.float32


def test_nan_where_nobody_reads():
    """Embeddings of vision rows, and gradients of a medium that is nowhere."""
    vision = some_vision(CPU, [3, 2], [0, 0], gap=1)
    text = (vision.source < 0)[:, None]
    embeddings = torch.where(text, torch.ones(8, 4), torch.nan).requires_grad_()
    own = layer(5, 6, 4)
    with torch.no_grad():
        own.inputs[3:] = torch.nan
    merged, _ = mp.project_and_merge(embeddings, own, vision)
    assert merged.isfinite().all()
    weight = torch.where(text, torch.full((8, 4), torch.nan), 1.0)
    merged.backward(weight)
    assert own.inputs.grad.isfinite().all() and not own.inputs.grad[3:].any()


def test_text_alone():
    vision = some_vision(CPU, [], [], gap=0, tail=5)
    embeddings = torch.randn(5, 4, requires_grad=True)
    own, level = layer(0, 6, 4), layer(0, 6, 4)
    merged, taken = mp.project_and_merge(embeddings, own, vision, [level])
    assert torch.equal(merged, embeddings) and taken[0].shape == (0, 4)
    merged.sum().backward()
    assert torch.equal(embeddings.grad, torch.ones(5, 4))
    assert torch.equal(own.weight.grad, torch.zeros(4, 6))


def test_there_is_no_second_derivative():
    vision = some_vision(CPU, [3], [0], gap=1)
    own = layer(3, 6, 4)
    merged, _ = mp.project_and_merge(torch.zeros(4, 4), own, vision)
    (grad,) = torch.autograd.grad(merged.square().sum(), own.inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias):
    vision = some_vision(CPU, [3, 4], [0, 1, 0], gap=1)
    parts = [[x if x is None else x.detach() for x in layer(7, 6, 4, bias=bias)] for _ in range(3)]
    inputs, weights, biases = (list(column) for column in zip(*parts, strict=True))
    rows = torch.randn(len(vision.source), 4)
    torch.library.opcheck(
        torch.ops.mmpack.project_and_merge.default, (rows, inputs, weights, biases, *vision)
    )
    grads = [rows, *(torch.randn(len(vision.rows), 4) for _ in range(2))]
    needs = [True, True, True, bias, False, True, False, True, False, bias]
    torch.library.opcheck(
        torch.ops.mmpack.unproject.default, (grads, inputs, weights, biases, *vision, needs)
    )


def test_compiles_in_one_piece():
    def step(embeddings, own, level, vision):
        merged, (taken,) = mp.project_and_merge(embeddings, own, vision, [level])
        return merged * 2, taken * 3

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for runs in ([0, 1, 0], [1, 0, 1, 0]):
        vision = some_vision(CPU, [3, 4], runs, gap=2)
        embeddings = torch.randn(len(vision.source), 4, requires_grad=True)
        layers = layer(7, 6, 4), layer(7, 5, 4, bias=False)
        results = []
        for f in (step, compiled):
            out = f(embeddings, *layers, vision)
            leaves = [embeddings, *tensors(layers)]
            results.append([*out, *torch.autograd.grad(out, leaves, [x.detach() for x in out])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


GOOD = {"embeddings": (8, 4), "inputs": (3, 6), "weight": (4, 6), "bias": (4,)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"embeddings": (7, 4)}, r"embeddings has shape \[7, 4\], expected \[8, H\]"),
        ({"embeddings": (1, 8, 4)}, "without the batch dimension"),
        ({"inputs": (4, 6)}, r"projector.inputs has shape \[4, 6\], expected \[3, K\]"),
        ({"weight": (6, 4)}, r"projector.weight has shape \[6, 4\], expected \[4, 6\]"),
        ({"bias": (1,)}, r"projector.bias has shape \[1\], expected \[4\]"),
        ({"inputs": [[1.0] * 6] * 3}, "projector.inputs is of type list"),
        ({"weight": torch.zeros(4, 6).bfloat16()}, "torch.bfloat16, torch.float32"),
        ({"weight": torch.zeros(4, 6, device="meta")}, "projector.weight on meta"),
        ({"embeddings": torch.zeros(8, 4).long()}, "embeddings has dtype torch.int64"),
    ],
)
@pytest.mark.parametrize("place", ["projector", "levels[0]"])
def test_what_is_refused(changed, message, place):
    vision = some_vision(CPU, [3], [0, 0], gap=1)
    made = {n: torch.zeros(s) if isinstance(s, tuple) else s for n, s in (GOOD | changed).items()}
    embeddings = made.pop("embeddings")
    bad, good = mp.Projection(**made), mp.Projection(*(torch.zeros(GOOD[n]) for n in made))
    layers = [bad, good] if place == "projector" else [good, bad]
    if "embeddings" not in changed and place != "projector":
        message = message.replace("projector", r"levels\[0\]")
    with pytest.raises(mp.ArgumentError, match=message):
        mp.project_and_merge(embeddings, layers[0], vision, layers[1:])


def test_other_things_are_refused():
    vision = some_vision(CPU, [3], [0], gap=1)
    own = layer(3, 6, 4)
    with pytest.raises(mp.ArgumentError, match="projector is of type tuple, expected a Projection"):
        mp.project_and_merge(torch.zeros(4, 4), tuple(own), vision)
    with pytest.raises(mp.ArgumentError, match=r"expected VisionRows. Fix: pass batch.vision_rows"):
        mp.project_and_merge(torch.zeros(4, 4), own, list(vision))
    with pytest.raises(mp.ArgumentError, match=r"levels is None, expected a list.* Fix: pass \[\]"):
        mp.project_and_merge(torch.zeros(4, 4), own, vision, None)
    with pytest.raises(mp.ArgumentError, match=r"vision\.rows is None, expected a tensor"):
        mp.project_and_merge(torch.zeros(4, 4), own, vision._replace(rows=None))
    with pytest.raises(mp.ArgumentError, match=r"vision has 2 rows and 3 features"):
        mp.project_and_merge(torch.zeros(4, 4), own, vision._replace(rows=vision.rows[:2]))
    with pytest.raises(mp.ArgumentError, match=r"vision\.rows runs from 2 to 4, expected \[0, 4"):
        mp.project_and_merge(torch.zeros(4, 4), own, vision._replace(rows=vision.rows + 1))
    moved = vision._replace(source=vision.source + 1)
    with pytest.raises(mp.ArgumentError, match=r"vision.source runs from 0 to 3, expected \[-1, 3"):
        mp.project_and_merge(torch.zeros(4, 4), own, moved)
