"""What the ops of logprobs refuse in one line; and NaN, on a GPU, where nobody looked."""

import pytest
import torch
from support.kernels import device_of_kernels, running
from torch._subclasses.fake_tensor import FakeTensorMode

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.ops import invariance
from mmpack.ops.backend import implementation
from mmpack.ops.logprobs import SELECTED_LOGPROBS
from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.call import Call, runtime_scalar
from mmpack.ops.logprobs.linear import blocks
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.logprobs.lists.call import Lists, runs_by
from mmpack.ops.logprobs.lists.products import by_products, can_multiply
from mmpack.ops.logprobs.support import Support

CPU = torch.device("cpu")
each_path = pytest.mark.parametrize(
    "path", ["torch", pytest.param("triton", marks=pytest.mark.kernel)]
)
each_source = pytest.mark.parametrize("source", ["logits", "hidden"])


def call(source, changed, listed=False):
    """With good arguments but those that are `changed`."""
    own = {"targets": torch.tensor([0, 8]), "rows": torch.tensor([0, 3])}
    if source == "logits":
        run = mp.ops.listed_logprobs if listed else mp.selected_logprobs
        own["logits"] = torch.zeros(4, 9)
    else:
        run = mp.ops.linear_listed_logprobs if listed else mp.linear_selected_logprobs
        own |= {"hidden": torch.zeros(4, 3), "weight": torch.zeros(9, 3)}
    return run(**(own | changed))


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


BOTH = [
    ({"targets": ints(0, 9)}, "targets runs from 0 to 9, expected [0, 9)"),
    ({"targets": torch.zeros(2)}, "targets has shape [2] and dtype torch.float32"),
    ({"targets": ints(0, 8).to("meta")}, "and targets on meta. Fix: move all to one device"),
    ({"rows": ints(-1, 0)}, "rows runs from -1 to 0, expected [0, 4)"),
    ({"rows": ints(0)}, "targets has 2 entries for 1 rows"),
    ({"rows": None}, "targets has 2 entries for 4 rows"),
    ({"temperature": 0.0}, "temperature is 0.0"),
    ({"entropy": "yes"}, "entropy is of type str, expected a bool"),
    ({"rows_unique": ints(0)}, "rows_unique and row_inverse must be passed together"),
    ({"rows_unique": ints(0), "row_inverse": ints(0, 1)}, "row_inverse runs from 0 to 1"),
    (
        {"rows_unique": ints(0), "row_inverse": ints(0)},
        "rows (2 entries) is not rows_unique[row_inverse] (1 entries)",
    ),
    ({"rows_unique": ints(0, 2), "row_inverse": ints(0, 1)}, "is not rows_unique[row_inverse]"),
    (
        {"rows": None, "rows_unique": ints(0, 2, 3), "row_inverse": ints(0, 2)},
        "row_inverse names 2 of 3 rows",
    ),
]
OF_LOGITS = [
    ({"logits": torch.zeros(1, 4, 9)}, "logits has shape [1, 4, 9]"),
    ({"logits": torch.zeros(4, 9).long()}, "torch.int64, expected a float"),
    ({"gradient": "compact"}, "gradient is 'compact', but rows may repeat"),
    ({"gradient": "inplace"}, "gradient is 'inplace', but rows may repeat"),
    ({"gradient": "none"}, "gradient is 'none'"),
]
OF_HIDDEN = [
    ({"hidden": torch.zeros(1, 4, 3)}, "hidden has shape [1, 4, 3]"),
    ({"weight": torch.zeros(9, 5)}, "weight has shape [9, 5], expected [V, 3]"),
    (
        {"weight": torch.zeros(9, 3, dtype=torch.int8)},
        "weight is torch.int8, expected a floating dtype",
    ),
    ({"bias": torch.zeros(3)}, "bias has shape [3], expected [9]"),
    ({"softcap": 0.0}, "softcap is 0.0"),
    ({"memory_budget": -1}, "memory_budget is -1"),
    ({"group": -100}, "group is of type int"),  # what new_group gives ranks outside of it
]
KEPT = [
    (Support(ints(0, 2, 2), ints(1, 4)), "list of loss token 1 in support is empty"),
    (Support(ints(0, 2, 4), ints(0, 4, 2, 5)), "loss token 1 in support lacks its target, id 8"),
    (Support(ints(0, 2, 4), ints(4, 0, 5, 8)), "list of loss token 0 in support has 0 after 4"),
    (Support(ints(0, 2, 5), ints(0, 4, 8, 8, 5)), "loss token 1 in support has 8 after 8"),
    (Support(ints(0, 2, 4), ints(0, 9, 3, 8)), "support.ids runs from 0 to 9, expected [0, 9)"),
    (Support(ints(0, 2, 3), ints(0, 4, 3, 8)), "support.offsets run from 0 to 3 for 4 ids"),
    (Support(ints(0, 5, 4), ints(0, 4, 3, 8)), "run from 0 to 4 and fall in between"),
    (Support(ints(0, 4), ints(0, 3, 4, 8)), "support has 2 offsets and 4 ids for 2 targets"),
    ([[1], [3]], "support is of type list, expected a Support"),
    (Support([0, 1, 2], ints(1, 3)), "support.offsets is of type list"),
    (Support(ints(0, 1, 2), None), "support.ids is None"),
    (Support(torch.zeros(3), ints(1, 3)), "dtype torch.float32"),
    (Support(ints(0, 1, 2), ints(1, 3)[None]), "shape [1, 2]"),
    (Support(ints(0, 1, 2), ints(1, 3).to("meta")), "on meta"),
    (Support(ints(), ints(1, 3)), "0 offsets and 2 ids"),
]
LISTED = [
    ([1], "lists is of type list"),
    ({1: Support(ints(0, 1, 1), ints(3))}, "lists is"),
    ({"a": torch.arange(3)}, "lists['a'] is of type Tensor"),
    ({"a": Support(ints(0, 1), ints(3))}, "has 1 lists for 2 targets"),
    ({"a": Support(ints(0, 2, 1), ints(3))}, "expected to rise"),
    ({"a": Support(ints(0, 1, 1), ints(9))}, "expected [0, 9)"),
]


def refused(source, changed, says, listed=False):
    with pytest.raises(ArgumentError) as error:
        call(source, changed, listed)
    said = str(error.value)
    assert says in said and ". Fix: " in said and "\n" not in said


@pytest.mark.parametrize(
    ("source", "changed", "says"),
    [(source, *case) for source in ("logits", "hidden") for case in BOTH]
    + [("logits", *case) for case in OF_LOGITS]
    + [("hidden", *case) for case in OF_HIDDEN],
)
def test_wrong_arguments_are_named(source, changed, says):
    refused(source, changed, says)


@each_source
def test_wrong_lists_are_named(source):
    for support, says in KEPT:
        refused(source, {"support": support}, says)
    for lists, says in LISTED:
        refused(source, {"lists": lists}, says, listed=True)
    lists = {"lists": {"a": Support(ints(0, 1, 1), ints(3))}}
    refused(source, lists | {"rows": ints(0, 4)}, "listed_logprobs: rows runs from 0 to 4", True)


@each_source
def test_shapes_of_meta_and_fake_tensors(source):
    tensors = {"logits": torch.zeros(2, 9)}
    if source == "hidden":
        tensors = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(9, 3)}
    tensors |= {"targets": ints(0, 8)}
    found = call(source, {n: x.to("meta") for n, x in tensors.items()} | {"rows": None})
    assert found.shape == (2,) and found.is_meta
    with FakeTensorMode() as mode:
        found = call(source, {n: mode.from_tensor(x) for n, x in tensors.items()} | {"rows": None})
    assert found.shape == (2,) and found.device.type == "cpu"


# What a GPU does not look at.


@each_path
def test_wrong_lists_that_nobody_looks_at_give_nan(path, monkeypatch):
    """No number where a list is wrong, in values and gradients; none at all if offsets don't fit."""
    device = running(path, monkeypatch)
    module = implementation(SUPPORT_LOGPROBS, device)
    for offsets, ids, wrong in (
        ([0, 2, 2], [1, 4], [1]),
        ([0, 2, 4], [1, 4, 2, 5], [1]),
        ([0, 2, 4], [4, 1, 3, 5], [0]),
        ([0, 2, 5], [1, 4, 3, 3, 5], [1]),
        ([0, 2, 3], [1, 4, 3, 5], [0, 1]),
        ([1, 2, 4], [1, 4, 3, 5], [0, 1]),
        ([0, 2, 9], [1, 4, 3, 5], [0, 1]),
    ):
        tensors = (torch.tensor(x, device=device) for x in (offsets, ids, [1, 3]))
        lists = Lists(*tensors, runtime_scalar(1.0, device))
        made = module.statistics(lists, torch.zeros(len(ids), device=device), True)
        assert made.logprobs.isnan().nonzero().flatten().tolist() == wrong
        assert made.entropies.isnan().nonzero().flatten().tolist() == wrong
        given = Incoming(torch.ones(2, device=device), torch.ones(2, device=device))
        slopes = module.slopes(lists, given, made, None)
        lost = torch.isin(lists.tokens.cpu(), torch.tensor(wrong))
        assert slopes.cpu()[~lost].isfinite().all()


@pytest.mark.kernel
def test_offsets_beyond_the_ids_are_not_followed(monkeypatch):
    device = running("triton", monkeypatch)
    monkeypatch.setattr("mmpack.ops.logprobs.arguments.can_look_at", lambda _: False)
    hidden, weight = (torch.randn(n, 24, device=device).requires_grad_() for n in (2, 9))
    offsets, ids = (torch.tensor(x, device=device) for x in ([0, 2, 1 << 40], [1, 4, 3, 5]))
    targets = torch.tensor([1, 3], device=device)
    lp = mp.linear_selected_logprobs(hidden, weight, targets, support=Support(offsets, ids))
    lp.sum().backward()
    assert lp.isnan().all() and hidden.grad.isnan().all() and weight.grad[[1, 4]].isnan().all()


@pytest.mark.kernel
def test_slots_that_no_loss_token_uses_and_targets_out_of_range(monkeypatch):
    device = running("triton", monkeypatch)
    module, one = implementation(SELECTED_LOGPROBS, device), runtime_scalar(1.0, device)
    logits, targets, up = torch.randn(9, 40), torch.arange(4), torch.randn(4)
    order, offsets, rows = torch.arange(4), ints(0, 2, 2, 4), ints(2, 5, 6)
    given = (x.to(device) for x in (logits, targets, rows, order, offsets))
    call = Call(*given, one, False, "compact")
    grad = module.backward(Incoming(up.to(device), None), call, module.forward(call)).cpu()
    wide = logits.double().requires_grad_()
    found = wide.log_softmax(-1)[rows[[0, 0, 2, 2]], targets]
    (want,) = torch.autograd.grad(found, wide, up.double())
    assert not grad[1].any() and (grad[[0, 2]] - want[[2, 6]]).abs().max() <= 1e-5
    call = call._replace(
        logits=torch.zeros(3, 9, device=device), rows=None, order=None, offsets=None
    )
    found = module.forward(call._replace(targets=ints(0, 9, -1).to(device)))
    assert found.logprobs.isnan().tolist() == [False, True, True]


@pytest.mark.kernel
@pytest.mark.parametrize("length", [1, 4, 5, 11, 12, 13, 64])
def test_runs_of_any_length_are_cut_and_joined(length, monkeypatch):
    """Sums over runs that begin at any place among the pieces, against index_add in float64."""
    from mmpack.ops.logprobs.lists import sum_kernels
    from mmpack.ops.logprobs.lists import triton as module

    device = device_of_kernels()
    monkeypatch.setattr(sum_kernels, "PIECE", 4 if device.type == "cpu" else 16)
    monkeypatch.setattr(sum_kernels, "COLUMNS", 32)
    keys = torch.cat([torch.zeros(3), torch.full((length,), 2), torch.full((length + 3,), 5)])
    keys = keys[torch.randperm(len(keys))].long().to(device)
    source = torch.randn(9, 70, device=device).bfloat16()
    index = torch.randint(0, 9, keys.shape, device=device)
    scale = torch.randn(len(keys), device=device)
    out = torch.full((7, 70), torch.nan, device=device)
    module.sum_runs(out, None, source, index, scale, runs_by(keys, 7))
    want = torch.zeros(7, 70, dtype=torch.float64, device=device)
    want.index_add_(0, keys, source[index].double() * scale.double()[:, None])
    assert (out - want).abs().max() <= 1e-6 * want.abs().max()
    assert not out[want.abs().sum(1) == 0].any()


# What is chosen.


def test_the_route_of_lists_follows_from_their_mean_length(monkeypatch):
    h200 = torch.device("cuda")
    tokens, vocab = 13_107, 152_064
    for length, dtype, whole in (
        (8, torch.bfloat16, False),
        (1230, torch.bfloat16, False),
        (1240, torch.bfloat16, True),
        (4000, torch.float32, False),
        (5000, torch.float32, True),
    ):
        assert by_products(tokens, tokens * length, vocab, h200, dtype) == whole
    assert by_products(10, 10_000, 2000, CPU, torch.float32)
    assert not by_products(10, 100, 2000, CPU, torch.float32)
    monkeypatch.setattr(invariance, "is_on", lambda: True)
    assert not by_products(tokens, tokens * 1240, vocab, h200, torch.bfloat16)
    monkeypatch.setattr("mmpack.ops.backend._why_not", lambda *_: None)
    assert can_multiply(h200, torch.bfloat16)
    monkeypatch.setenv("MMPACK_BACKEND", "torch")
    assert not can_multiply(h200, torch.bfloat16) and can_multiply(CPU, torch.float32)


def test_a_budget_widens_the_chunks():
    headline = 13_107, 3584, 151_936, (128, 256)
    logits = 13_107 * 151_936 * 2

    def taken(rows, columns):
        return rows * (6 * 3584 + 2 * columns)

    default = blocks.plan_blocks(*headline, stored=False, budget=0)
    assert taken(*default) <= logits / 20
    for share in (1 / 4, 1 / 8):
        rows, columns = blocks.plan_blocks(*headline, stored=False, budget=int(logits * share))
        assert rows >= 13_107
        assert logits * share * 0.95 <= taken(13_107, columns) <= logits * share
    for count in (4096, 5000, 131_072):
        assert blocks.plan_blocks(count, *headline[1:], stored=False, budget=0)[1] == default[1]
