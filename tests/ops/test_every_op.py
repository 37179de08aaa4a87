"""Every op under what torch does to a step: checkpointing, autocast, torch.compile, other derivatives, CUDA graphs.

One row of `cases` per op. Each runs in plain torch on the CPU, and by its kernels: on a GPU, or interpreted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.gathers import some_vision
from support.kept_ids import draw_support
from support.kernels import running
from support.waits import never_waits
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.rewards.scores import scatter_op
from mmpack.ops.attention import plan_attention, plan_sequences, sequence_attention, tree_attention
from mmpack.ops.embeddings.merge import merge_embeddings
from mmpack.ops.linear_attention import plan_segments, segment_conv1d, segment_delta_rule
from mmpack.ops.logprobs.call import runtime_scalar
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import linear_listed_logprobs
from mmpack.ops.logprobs.lists import hidden as lists
from mmpack.ops.logprobs.row_groups import make_row_groups
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.norms.rows import row_sum
from mmpack.ops.patches import normalize as _normalize  # noqa: F401 (registers its op)
from mmpack.ops.patches.pack import pack_video
from mmpack.ops.patches.tables import patch_tables
from mmpack.ops.products.product import product
from mmpack.ops.projection.project import Projection, project_and_merge
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.inverse import inverse_index
from mmpack.video.patches import plan_patches

PATHS = ["torch", pytest.param("triton", marks=pytest.mark.kernel)]
each_path = pytest.mark.parametrize("path", PATHS)
OPS = torch.ops.mmpack


class Case(NamedTuple):
    step: Callable[..., Tensor]  # of the leaves, to one number
    leaves: tuple[Tensor, ...]
    ops: tuple[tuple[Any, ...], ...] = ()  # what is registered, each with its arguments
    exact: Callable[..., Tensor] | None = None  # what it computes, by torch, of float64 leaves


def weighed(*outputs: Tensor) -> Tensor:
    """One number, whose gradient to each value is another."""
    total = torch.zeros((), device=outputs[0].device)
    for x in outputs:
        places = torch.arange(x.numel(), device=x.device).view(x.shape)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        total = total + (x * (places * 0.37).cos()).sum() + (x**2).sum()
    return total


def cases(path: str, device: torch.device) -> dict[str, Case]:
    """Every op, on numbers that are always the same; kernels of products get halves."""
    made = torch.Generator().manual_seed(0)
    half = torch.bfloat16 if path == "triton" else torch.float32

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=made).to(device, dtype)

    def whole(*values: int) -> Tensor:
        return torch.tensor(values, device=device)

    return (
        losses(normal, whole)
        | of_rows(normal, whole, half, device)
        | logprobs(normal, whole, half, device)
        | of_layers(normal, half, device)
    )


def losses(normal, whole) -> dict[str, Case]:
    lp, old, ref, entropy, weight = (normal(6) for _ in range(5))
    adv, cu, groups = normal(2), whole(0, 3, 6).int(), whole(4, 4)

    def policy(lp, entropy):
        options = {"kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.1}
        return mp.policy_loss(lp, adv, cu, old, ref, **options).loss

    def rewarded(lp):
        token = scatter_op(mp.group_advantages(adv, groups), cu, 6, 1.0, "mean")
        return mp.policy_loss(lp, token, cu, old).loss + (weight * token).sum()

    return {"policy_loss": Case(policy, (lp, entropy)), "scatter_rewards": Case(rewarded, (lp,))}


def of_rows(normal, whole, half, device) -> dict[str, Case]:
    x, index = normal(5, 3), whole(4, 0, 0, 2)
    vision = some_vision(device, [3, 4], [0, 1, 0], gap=1)
    count, places = len(vision.source), len(vision.rows)
    rows, seen, deep = normal(count, 8), normal(7, 8), normal(7, 8)
    layers = [
        (normal(7, 16, dtype=half), normal(8, 16, dtype=half), normal(8, dtype=half)) for _ in "ab"
    ]
    columns = [list(x) for x in zip(*layers, strict=True)]
    text = normal(count, 8, dtype=half)
    grads = [text, normal(places, 8, dtype=half)]
    tables = patch_tables(plan_patches([(3, 28, 56, 3)], "qwen2_vl"), device)
    clips = tuple(normal(*shape) for shape in tables.shapes)
    change = ([0.5, 0.4, 0.3], [0.2, 0.3, 0.25], 1 / 255, torch.float32, True)
    patches = normal(tables.num_rows, 1176)
    table = normal(3, 256), torch.bfloat16 if device.type == "cuda" else torch.float16
    some_bytes = torch.arange(36, device=device).view(3, 12).to(torch.uint8)

    def merged(rows, seen, deep):
        out, levels = merge_embeddings(rows, seen, vision, [deep, deep])
        return weighed(out, *levels)

    def projected(text, *flat):
        layer, level = Projection(*flat[:3]), Projection(*flat[3:])
        out, levels = project_and_merge(text, layer, vision, [level])
        return weighed(out, *levels)

    return {
        "gather_rows": Case(
            lambda x: weighed(gather_rows(x, index)),
            (x,),
            (
                (OPS.gather_rows, x, index),
                (OPS.sum_rows, normal(4, 3), index, None, None, 5),
                (OPS.sum_rows, normal(4, 3), index, *inverse_index(index, 5), 5),
            ),
            lambda x: weighed(x[index]),
        ),
        "merge_embeddings": Case(
            merged,
            (rows, seen, deep),
            (
                (OPS.merge_embeddings, rows, seen, [], *vision),
                (OPS.merge_embeddings, rows, seen, [deep, deep], *vision),
                (OPS.unmerge_embeddings, rows, [], *vision, count, 7),
                (OPS.unmerge_embeddings, rows, [normal(places, 8)], *vision, count, 7),
            ),
        ),
        "project_and_merge": Case(
            projected,
            (text, *layers[0], *layers[1]),
            (
                (OPS.project_and_merge, text, *columns, *vision),
                (OPS.project_and_merge, text, *columns[:2], [None, None], *vision),
                (OPS.unproject, grads, *columns, *vision, [True] * 4 + [False, True, False]),
            ),
        ),
        "pack_video": Case(
            lambda *clips: weighed(pack_video(list(clips), tables)),
            clips,
            (
                (OPS.pack_video, list(clips), *tables.layout, *change),
                (OPS.unpack_video, patches, *tables.layout, True),
                (OPS.normalize_bytes, some_bytes, *table),
            ),
        ),
    }  # fmt: skip


def logprobs(normal, whole, half, device) -> dict[str, Case]:
    rows, targets = whole(7, 1, 1, 0, 7), whole(1, 36, 4, 36, 0)
    unique, inverse = rows.unique(return_inverse=True)
    known = {"rows_unique": unique, "row_inverse": inverse, "entropy": True, "temperature": 0.7}
    torch.manual_seed(0)
    support = draw_support(targets.cpu(), 40, 9).to(device)
    logits, hidden = normal(9, 40), normal(9, 16, dtype=half)
    head = normal(40, 16, dtype=half), normal(40, dtype=half)
    scale, groups = runtime_scalar(0.7, device), make_row_groups(9, None, unique, inverse)
    kept = support.offsets, support.ids, targets, scale
    given = normal(5), normal(5)
    statistics = OPS.selected_logprobs.default(logits, targets, *groups, scale, True, "dense")
    forms = tuple(
        (op, *given, logits, targets, *groups, scale, True, form, *statistics)
        for op, form in (
            (OPS.selected_logprobs_backward, "dense"),
            (OPS.selected_logprobs_backward, "compact"),
            (OPS.selected_logprobs_backward_, "inplace"),
        )
    )  # fmt: skip
    leaf = logits.clone().requires_grad_()
    factors = [x.clone().requires_grad_() for x in (hidden, *head)]

    def of_logits(x):
        return weighed(*selected_logprobs(x * 2, targets, **known))

    def of_kept_logits(x):
        return weighed(*selected_logprobs(x * 2, targets, support=support, **known))

    def of_hidden(x, weight, bias):
        lp, h = linear_selected_logprobs(x, weight, targets, bias=bias, softcap=9.0, **known)
        return weighed(lp, h)

    def of_kept_hidden(x, weight, bias):
        options = known | {"bias": bias, "support": support}
        return weighed(*linear_selected_logprobs(x, weight, targets, **options))

    def of_lists(x, weight, bias):
        out = linear_listed_logprobs(x, weight, targets, {"a": support}, bias=bias, **known)
        return weighed(out.targets, out.lists["a"], out.entropy)

    def opened(store):
        return *factors, targets, *groups, 0.7, 9.0, True, store, 0, 0, 40, ""

    return {
        "selected_logprobs": Case(
            of_logits,
            (logits,),
            ((OPS.selected_logprobs, leaf, targets, *groups, scale, True, "dense"), *forms),
        ),
        "support_logprobs": Case(
            of_kept_logits,
            (logits,),
            ((OPS.support_logprobs, leaf, *kept, rows, rows, False, True, "dense", 9),),
        ),
        "linear_selected_logprobs": Case(
            of_hidden,
            (hidden, *head),
            tuple((OPS.linear_selected_logprobs, *opened(store)) for store in (False, True)),
        ),
        "support_linear_logprobs": Case(
            of_kept_hidden,
            (hidden, *head),
            tuple(
                (OPS.support_linear_logprobs, *factors, *kept, rows, False, way, 9.0, True, 0, 40, "")
                for way in (False, True)
            ),
        ),
        "linear_listed_logprobs": Case(of_lists, (hidden, *head)),
    }  # fmt: skip


def of_layers(normal, half, device) -> dict[str, Case]:
    segments = plan_segments(np.array([0, 4, 7, 9]), np.array([-1, 0, 0])).to(device)
    x, weight, bias = normal(9, 6), normal(6, 4), normal(6)
    conv = x, weight, bias, segments.previous, True
    until = np.array([9, 9, 9, 9, 7, 7, 7, 9, 9])
    plan = plan_attention(until, until == 0).to(device)
    seen = torch.from_numpy(until).to(device, torch.int32)
    tower = plan_sequences([4, 3, 2]).to(device)
    attended = tuple(normal(1, heads, 9, 16) for heads in (4, 2, 2))
    delta = (
        normal(9, 1, 4),
        normal(9, 1, 4),
        normal(9, 2, 4),
        -normal(9, 2).abs(),
        normal(9, 2).sigmoid(),
    )
    return {
        "product": Case(
            lambda a, b, c: weighed(product(a, b, c)),
            (normal(5, 16, dtype=half), normal(16, 8, dtype=half), normal(8, dtype=half)),
            exact=lambda a, b, c: weighed(a @ b + c),
        ),
        "row_sum": Case(
            lambda x: weighed(row_sum(x)), (normal(5, 37),), exact=lambda x: weighed(x.sum(-1))
        ),
        "rms_norm": Case(
            lambda x, w: weighed(rms_norm(x, w)),
            (normal(5, 37), normal(37)),
            exact=lambda x, w: weighed(F.rms_norm(x, (37,), w, 1e-6)),
        ),
        "segment_conv1d": Case(
            lambda *x: weighed(segment_conv1d(*x, plan=segments)),
            (x, weight, bias),
            (
                (OPS.segment_conv1d, *conv),
                (OPS.segment_conv1d_backward, x, *conv, *segments.far, True),
            ),
        ),
        "segment_delta_rule": Case(lambda *x: weighed(segment_delta_rule(*x, segments, backend="torch")), delta),
        "tree_attention": Case(
            lambda *x: weighed(tree_attention(*x, seen, plan, backend="fixed_blocks")), attended
        ),
        "sequence_attention": Case(
            lambda *x: weighed(sequence_attention(*x, tower, backend="fixed_blocks")), attended
        ),
    }  # fmt: skip


LOSSES = ("policy_loss", "scatter_rewards")
ROWS = ("gather_rows", "merge_embeddings", "project_and_merge", "pack_video")
LOGPROBS = (
    "selected_logprobs", "support_logprobs", "linear_selected_logprobs", "support_linear_logprobs",
    "linear_listed_logprobs",
)  # fmt: skip
SUMS = ("product", "row_sum", "rms_norm")
LAYERS = ("segment_conv1d", "segment_delta_rule", "tree_attention", "sequence_attention")
NAMES = LOSSES + ROWS + LOGPROBS + SUMS + LAYERS
EXACT = ("gather_rows", *SUMS)
WITH_OPS = (*ROWS, *LOGPROBS[:4], "segment_conv1d")


def each_op(*names):
    return pytest.mark.parametrize("name", names)


@pytest.fixture
def case(path, name, monkeypatch) -> Case:
    device = running(path, monkeypatch)
    monkeypatch.setattr(lists, "by_products", lambda *_: False)
    return cases(path, device)[name]


def gradients(step, leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    value = step(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


def assert_same(found, wanted):
    assert all(map(torch.equal, found, wanted))


def test_all_are_here(monkeypatch):
    made = cases("torch", running("torch", monkeypatch))
    assert set(made) == set(NAMES) and all(made[name].ops for name in WITH_OPS)
    assert {name for name, case in made.items() if case.exact} == set(EXACT)
    registered = {op[0] for case in made.values() for op in case.ops}
    assert len(registered) == 17


@each_path
@each_op(*EXACT)
def test_values_and_gradients_are_those_of_float64(case):
    found = gradients(case.step, case.leaves)
    wanted = gradients(case.exact, [x.double() for x in case.leaves])
    bound = 1e-5 if all(x.dtype == torch.float32 for x in case.leaves) else 2e-2
    for got, want in zip(found, wanted, strict=True):
        assert (got.double() - want).norm() <= bound * want.norm() + 1e-6


@each_path
@each_op(*WITH_OPS)
def test_opcheck(case):
    for op, *arguments in case.ops:
        torch.library.opcheck(op.default, tuple(arguments))


@each_path
@each_op(*NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(case, reentrant):
    step, leaves, *_ = case
    own = [x.clone().requires_grad_() for x in leaves]
    value = checkpoint(step, *own, use_reentrant=reentrant)
    value.backward()
    assert_same((value.detach(), *(x.grad for x in own)), gradients(step, leaves))


@each_path
@each_op(*LOSSES, "gather_rows", "merge_embeddings", *LOGPROBS, "segment_delta_rule")
def test_autocast_changes_nothing(case):
    step, leaves, *_ = case

    def cast(*leaves):
        with torch.autocast(leaves[0].device.type, dtype=torch.bfloat16):
            return step(*leaves)

    assert_same(gradients(cast, leaves), gradients(step, leaves))


@pytest.mark.few(4)
@each_path
@each_op(*LOSSES, *ROWS, *LOGPROBS)
def test_compiled_in_one_piece(case):
    step, leaves, *_ = case
    torch._dynamo.reset()
    way = (
        {"backend": "inductor"} if leaves[0].is_cuda else {"backend": "aot_eager", "dynamic": True}
    )
    compiled = torch.compile(step, fullgraph=True, **way)
    for got, want in zip(gradients(compiled, leaves), gradients(step, leaves), strict=True):
        torch.testing.assert_close(got, want)


@each_path
@each_op(*LOSSES, "gather_rows", "merge_embeddings", "pack_video", *LOGPROBS)
def test_forward_mode_is_refused(case):
    """Without a formula torch would give no tangent, or zeros."""
    step, leaves, *_ = case
    why = r"forward[- ](mode )?(AD|derivative|mode)|must override the setup_context"
    with forward_ad.dual_level(), pytest.raises((ArgumentError, RuntimeError), match=why):
        step(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in leaves))
    with pytest.raises((ArgumentError, RuntimeError), match=why):
        torch.func.jvp(step, tuple(leaves), tuple(leaves))


@each_path
@each_op("policy_loss", "project_and_merge", *LOGPROBS, "rms_norm", "segment_conv1d")
def test_a_second_derivative_is_refused(case):
    step, leaves, *_ = case
    leaves = [x.clone().requires_grad_() for x in leaves]
    with pytest.raises(
        (ArgumentError, RuntimeError), match=r"second derivative|autograd formula|once_diff"
    ):
        first = torch.autograd.grad(step(*leaves), leaves, create_graph=True)
        sum(g.float().square().sum() for g in first).backward()


@pytest.mark.kernel
@pytest.mark.parametrize("path", ["triton"])
@each_op(*NAMES)
def test_every_output_is_written(case):
    """With NaN in all memory that is handed out uninitialised, nothing changes."""
    step, leaves, *_ = case
    wanted = gradients(step, leaves)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = gradients(step, leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["triton"])
@each_op(*ROWS, *LOGPROBS)
def test_nothing_waits_and_a_graph_replays_it(case):
    step, leaves, *_ = case
    leaves = [x.clone().requires_grad_() for x in leaves]

    def run():
        value = step(*leaves)
        return value.detach(), *torch.autograd.grad(value, leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        never_waits(run)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    graph.replay()
    assert_same(captured, run())


def test_transforms_of_functions_are_refused():
    x, index = torch.randn(4, 5, 3, requires_grad=True), torch.tensor([0, 2, 2])
    vision = some_vision(torch.device("cpu"), [2], [0], gap=3)
    refused = "it has no rule for torch.func's transforms. Fix: call it outside"
    with pytest.raises(ArgumentError, match=f"gather_rows: {refused}"):
        torch.vmap(lambda rows: gather_rows(rows, index))(x)
    with pytest.raises(ArgumentError, match=f"merge_embeddings: {refused}"):
        torch.func.grad(lambda rows: merge_embeddings(rows, x[0, :2], vision)[0].sum())(x[0])


def test_what_is_constant_in_the_policy_loss():
    cu, lp = torch.tensor([0, 3]).int(), torch.randn(3)
    leaf, one = torch.randn(3, requires_grad=True), torch.ones(1, requires_grad=True)
    out = mp.policy_loss(lp, one, cu, leaf, leaf, leaf, entropy=leaf, correction="tis", kl_coef=0.1)
    assert not out.loss.requires_grad
    out = mp.policy_loss(lp, one, cu, entropy=leaf, entropy_coef=0.5)
    out.loss.backward()
    torch.testing.assert_close(leaf.grad, torch.full((3,), -0.5 / 3))
    assert one.grad is None
