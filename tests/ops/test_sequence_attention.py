"""Attention within sequences against explicit softmax in float64; which backend is chosen, and what is refused."""

import json
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import (
    draw,
    gradients,
    gradients_in_turn,
    one_sequence_after_the_other,
    stand_in,
)
from support.benchmarks import FOLDER, benchmark
from torch.nn.attention.flex_attention import create_mask, flex_attention

from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.attention import (
    SEQUENCES,
    TREE,
    choose,
    plan_sequences,
    plan_tiles,
    resolve_sequences,
    sequence_attention,
    varlen,
)
from mmpack.ops.attention.by_length import brought_together, by_length

LENGTHS = {
    "one": [9],
    "equal": [4] * 5,
    "sorted": [6, 6, 3, 3, 1],
    "windows at the edges": [16, 16, 8, 16, 16, 8, 4, 4, 2],
    "a tiny one and a large one": [1, 40, 4],
}


def by_weights(q, k, v, lengths, scale=None):
    """softmax of all scores of rows of one sequence, in the dtype of q: [B, S, heads, d]."""
    lines, heads, width, dim = q.shape
    q, k, v = (
        x.transpose(1, 2).reshape(1, lines * width, -1, dim).transpose(1, 2) for x in (q, k, v)
    )
    own = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    groups = heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (dim**-0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(own[:, None] != own, -torch.inf), -1)
    return (weights @ v).transpose(1, 2).reshape(lines, width, heads, dim)


def assert_near(found, expected, off=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).abs().max() <= off


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", LENGTHS)
def test_values_and_gradients(name, scale):
    lengths = LENGTHS[name]
    plan = plan_sequences(lengths)
    q, k, v, grad = draw(1, 4, 2, sum(lengths), 8, torch.float64)
    expected = gradients(lambda *x: by_weights(*x, lengths, scale), q, k, v, grad)
    found = gradients(lambda *x: sequence_attention(*x, plan, scale=scale), q, k, v, grad)
    assert_near(found, expected)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_rows_are_brought_together_and_back(lengths):
    """What runs on a GPU under sdpa: one call for each length."""
    plan = plan_sequences(lengths)
    assert len(plan.groups) == len(set(lengths))
    assert sum(length * count for length, count in plan.runs) == sum(lengths) == plan.rows
    q, k, v, grad = (
        x[0].transpose(0, 1) if x.shape[1] == 2 else x[0]
        for x in draw(1, 2, 2, plan.rows, 4, torch.float64)
    )
    one = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = gradients(lambda *x: by_weights(*x, lengths), *one, grad[None])
    for way in (by_length, brought_together):
        out, *back = gradients(lambda *x, w=way: w(*x, plan), q, k, v, grad)
        assert_near([out[None], *(x.transpose(0, 1)[None] for x in back)], expected)


def test_a_window_sees_no_other():
    """The comparisons can see a wrong rule; and what is beyond a window may be NaN."""
    plan = plan_sequences([4, 4])
    q, k, v, _ = draw(1, 2, 2, 8, 8, torch.float64)
    right = sequence_attention(q, k, v, plan)
    assert (sequence_attention(q, k, v, plan_sequences([8])) - right).abs().max() > 1e-2
    k[:, :, 4:], v[:, :, 4:] = torch.nan, torch.nan
    assert torch.equal(sequence_attention(q, k, v, plan)[:, :4], right[:, :4])


@pytest.mark.parametrize("lines", [1, 3])
def test_tiles(lines):
    q, k, v, grad = draw(lines, 2, 2, 5, 8, torch.float64)
    expected = gradients(lambda *x: by_weights(*x, [5] * lines), q, k, v, grad)
    for plan in (plan_tiles(lines, 5, "cpu"), plan_sequences([5] * lines)):
        assert plan.cu_seqlens.tolist() == list(range(0, 5 * lines + 1, 5))
        assert (plan.pairs, plan.max_seqlen, plan.sequences) == (25 * lines, 5, lines)
        assert_near(
            gradients(lambda *x, p=plan: sequence_attention(*x, p), q, k, v, grad), expected
        )


@pytest.mark.parametrize("forced", [None, "sdpa"])
def test_no_rows(forced, monkeypatch):
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", forced or "auto")
    q, k, v, grad = draw(1, 4, 2, 0, 8, torch.float32)
    found = gradients(lambda *x: sequence_attention(*x, plan_sequences([])), q, k, v, grad)
    assert [x.shape for x in found] == [grad.shape, q.shape, k.shape, v.shape]


def test_the_same_bits_alone_and_among_others():
    lengths = [16, 16, 8, 16]
    q, k, v, grad = draw(1, 2, 2, 56, 8, torch.float32)
    together = gradients(lambda *x: sequence_attention(*x, plan_sequences(lengths)), q, k, v, grad)
    alone = gradients(
        lambda *x: sequence_attention(*x, plan_sequences([8])),
        *(x[:, :, 32:40] for x in (q, k, v)),
        grad[:, 32:40],
    )
    assert torch.equal(together[0][:, 32:40], alone[0])
    for a, b in zip(together[1:], alone[1:], strict=True):
        assert torch.equal(a[:, :, 32:40], b)


def test_autocast_casts_as_for_sdpa():
    q, k, v, _ = draw(1, 2, 2, 6, 8, torch.float32)
    plan = plan_sequences([4, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sequence_attention(q, k, v, plan)
    assert out.dtype == torch.bfloat16
    half = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(out, sequence_attention(*half, plan))


def test_dropout_drops_weights_and_scales_the_rest():
    lengths, rate = [40, 40], 0.25
    q = torch.zeros(1, 2, 80, 80)
    v = torch.eye(80).expand(1, 2, 80, 80)
    torch.manual_seed(0)
    found = sequence_attention(q, q, v, plan_sequences(lengths), dropout=rate)
    whole = by_weights(q, q, v, lengths)
    kept = found != 0
    torch.testing.assert_close(found[kept], whole[kept] / (1 - rate))
    assert abs(float(1 - kept.sum() / (whole != 0).sum()) - rate) < 0.03


@pytest.mark.parametrize("name", LENGTHS)
def test_blocks_of_flex_attention(name, monkeypatch):
    """The blocks hold every pair that is seen, and full ones no other; the rule is the mask of the sequences."""
    from mmpack.ops.attention import flex

    monkeypatch.setattr(flex, "FLEX_BLOCK", 4)
    lengths = LENGTHS[name]
    plan = plan_sequences(lengths)
    mask = flex.block_mask_of_sequences(plan)
    own = np.repeat(np.arange(len(lengths)), lengths)
    seen = own[:, None] == own
    rule = create_mask(mask.mask_mod, 1, 1, plan.rows, plan.rows, "cpu")
    assert np.array_equal(rule[0, 0].numpy(), seen)
    count = -(-plan.rows // 4)
    whole = np.zeros((4 * count, 4 * count), dtype=bool)
    whole[: plan.rows, : plan.rows] = seen
    blocks = whole.reshape(count, 4, count, 4).transpose(0, 2, 1, 3).reshape(count, count, 16)
    found = [np.zeros((count, count), dtype=bool) for _ in range(2)]
    kinds = (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    for listed, (numbers, columns) in zip(found, kinds, strict=True):
        for i in range(count):
            listed[i, columns[0, 0, i, : numbers[0, 0, i]].numpy()] = True
    assert np.array_equal(found[1], blocks.all(2))
    assert np.array_equal(found[0] | found[1], blocks.any(2))


def test_flex_attention_by_these_blocks():
    from mmpack.ops.attention.flex import block_mask_of_sequences

    lengths = [64, 64, 130, 32, 64]
    plan = plan_sequences(lengths)
    q, k, v, _ = draw(1, 2, 2, plan.rows, 16, torch.float64)
    out = flex_attention(q, k, v, block_mask=block_mask_of_sequences(plan)).transpose(1, 2)
    assert (out - by_weights(q, k, v, lengths)).abs().max() <= 1e-6  # its softmax is in fp32


@pytest.fixture
def hopper(monkeypatch):
    """As if a Hopper GPU were here with every package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(choose, "INSTALLED", dict.fromkeys(choose.INSTALLED, True))
    monkeypatch.delenv("MMPACK_TOWER_ATTENTION", raising=False)
    return torch.device("cuda")


@pytest.mark.parametrize("dim", [64, 72, 80])
def test_what_is_chosen(hopper, dim, monkeypatch):
    """What was measured fastest: short windows and frames, long pictures; equal lengths, and others."""
    plan = plan_sequences([64] * 256)
    kinds = {
        "windows": plan,
        "ragged windows": plan_sequences([64, 64, 32] * 64),
        "frames": plan_sequences([98] * 128),
        "pictures": plan_sequences([3136] * 4),
        "other pictures": plan_sequences([3136, 1024, 4096]),
        "tiles": plan_tiles(20, 1025, "cpu"),
    }

    def taken():
        return {k: SEQUENCES.choices(p, hopper, dim)[torch.bfloat16] for k, p in kinds.items()}

    def with_packages(*installed):
        monkeypatch.setattr(choose, "INSTALLED", {p: p in installed for p in choose.INSTALLED})
        return taken()

    large = dict.fromkeys(("pictures", "other pictures", "tiles"), "flash_attn_4")
    of_torch = dict.fromkeys(kinds, "varlen")
    assert with_packages("torch", "triton") == of_torch
    with_flash = {k: v.replace("varlen", "flash_attn") for k, v in of_torch.items()}
    assert with_packages("torch", "flash-attn") == with_flash
    assert with_packages("torch", "flash-attn-4") == of_torch | large
    chosen = SEQUENCES.choices(plan, hopper, dim)
    assert chosen[torch.float32] == chosen[torch.float64] == "sdpa"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert taken() == of_torch | large
    assert SEQUENCES.choices(plan, hopper, 12)[torch.bfloat16] == "sdpa"
    assert SEQUENCES.choices(plan, hopper, dim, dropout=0.1)[torch.bfloat16] == "sdpa"
    assert SEQUENCES.choices(plan, torch.device("cpu"), dim)[torch.bfloat16] == "sdpa"


SIZES = [16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128]
# up to 16 by one kernel of the backward, up to 32 by the others
ROUNDED_TWO_WAYS = [d for d in SIZES if -(-d // 16) * 16 != -(-d // 32) * 32]


@pytest.mark.parametrize(
    ("table", "name"), [(TREE, "flash_attn_4"), (TREE, "flex_flash"), (SEQUENCES, "flash_attn_4")]
)
def test_heads_that_are_rounded_two_ways_on_hopper(hopper, table, name, monkeypatch):
    """Those of text are refused, those of towers padded. Blackwell's kernels agree."""

    def refused():
        reasons = {d: table.why_not(name, hopper, torch.bfloat16, d) for d in SIZES}
        return [d for d, why in reasons.items() if why is not None]

    assert refused() == (ROUNDED_TWO_WAYS if table is TREE else [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert refused() == []


def test_to_what_size_heads_are_padded(hopper, monkeypatch):
    major = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: major)
    found = {d: varlen.right_size(d, hopper) for d in SIZES}
    assert {d for d, wide in found.items() if wide != d} == set(ROUNDED_TWO_WAYS)
    assert (found[72], found[80], found[16], found[104]) == (96, 96, 32, 128)
    assert not set(found.values()) & set(ROUNDED_TWO_WAYS)
    major.major = 10
    assert all(varlen.right_size(d, hopper) == d for d in SIZES)
    assert varlen.right_size(80, torch.device("cpu")) == 80


def test_the_fastest_of_the_measured_is_chosen(hopper, monkeypatch):
    """Of the shapes of benchmarks/tower_attention.py, by its results."""
    module = benchmark("tower_attention")
    path = FOLDER / "results" / "tower_attention.json"
    monkeypatch.setattr(choose, "INSTALLED", choose.INSTALLED | {"flash-attn": False})
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["backend"] != module.PEER:
            found.setdefault(row["shape"], []).append((row["forward_backward_ms"], row["backend"]))
    assert len(found) == 7
    for shape, times in found.items():
        dim, lengths = module.SHAPES[shape]
        plan = plan_sequences(lengths)
        assert SEQUENCES.choices(plan, hopper, dim)[torch.bfloat16] == min(times)[1], shape


def test_padding_has_its_price(hopper, monkeypatch):
    """Of some lengths, FlashAttention-4 is the fastest only without padding."""
    plan = plan_sequences([288] * 64)

    def taken(dim):
        return SEQUENCES.choices(plan, hopper, dim)[torch.bfloat16]

    monkeypatch.setattr(choose, "INSTALLED", choose.INSTALLED | {"flash-attn": False})
    assert taken(64) == "flash_attn_4" and taken(72) == "varlen"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert taken(72) == "flash_attn_4"


@pytest.mark.parametrize("dynamic", [None, True])
def test_tiles_choose_while_torch_compile_traces(hopper, dynamic):
    """Their plan is made within the graph."""

    def chosen(x):
        plan = plan_tiles(x.shape[0], x.shape[1], x.device)
        return SEQUENCES.choices(plan, hopper, 64)[torch.bfloat16]

    torch._dynamo.reset()
    traced = torch.compile(chosen, backend="eager", fullgraph=True, dynamic=dynamic)
    for rows in (257, 1025, 2048):
        x = torch.ones(30, rows)
        assert traced(x) == chosen(x) == ("flash_attn" if rows < 1024 else "flash_attn_4")


def test_report(hopper, monkeypatch):
    what, backends, why = SEQUENCES.report(hopper)
    able = ["sdpa", "flash_attn_4", "flash_attn", "varlen"]
    assert what == "tower attention" and backends.split(", ") == able
    assert why == "the cheapest for each batch"
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", "varlen")
    assert SEQUENCES.report(hopper)[1:] == ("varlen", "MMPACK_TOWER_ATTENTION=varlen")
    _, backend, why = SEQUENCES.report(torch.device("cpu"))
    assert backend is None and "varlen needs a CUDA device, not cpu. Fix: set MMPACK_TOWER" in why


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("varlen", "tower attention: varlen was requested, but varlen needs a CUDA device"),
        ("flash_attn", "flash-attn is not installed. Fix: set MMPACK_TOWER_ATTENTION=auto"),
        (
            "flex_flash",
            "'flex_flash' is not a backend. Fix: set MMPACK_TOWER_ATTENTION=auto, or one of",
        ),
    ],
)
def test_a_forced_backend_that_cannot_run_is_an_error(name, message, monkeypatch):
    monkeypatch.setattr(choose, "INSTALLED", {p: p == "torch" for p in choose.INSTALLED})
    q, k, v, _ = draw(1, 2, 2, 7, 8, torch.float32)
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", name)
    with pytest.raises(BackendError, match=message):
        resolve_sequences(plan_sequences([3, 4]), q.device, 8)
    with pytest.raises(BackendError, match=message):
        sequence_attention(q, k, v, plan_sequences([3, 4]))
    monkeypatch.delenv("MMPACK_TOWER_ATTENTION")
    with pytest.raises(BackendError, match=message):
        sequence_attention(q, k, v, plan_sequences([3, 4]), backend=name)


def test_what_does_not_fit_is_an_error():
    q, k, v, _ = draw(1, 2, 2, 7, 8, torch.float32)
    plan = plan_sequences([3, 4])
    with pytest.raises(ArgumentError, match="the plan is for 8 rows, but there are 1 × 7"):
        sequence_attention(q, k, v, plan_sequences([8]))
    with pytest.raises(ArgumentError, match="key has shape"):
        sequence_attention(q, k[:, :, :5], v, plan)
    with pytest.raises(ArgumentError, match="scale"):
        sequence_attention(q, k, v, plan, scale="1")
    with pytest.raises(ArgumentError, match="dropout"):
        sequence_attention(q, k, v, plan, dropout=1.5)
    with pytest.raises(ArgumentError, match="leave out empty sequences"):
        plan_sequences([3, 0, 4])


def test_a_plan_moves_and_pickles():
    plan = plan_sequences([4, 2, 4])
    assert plan.to("cpu") is plan
    resolve_sequences(plan, torch.device("cpu"), 8)
    again = pickle.loads(pickle.dumps(plan))
    assert again.choice is None and again.groups == plan.groups
    assert torch.equal(again.into_groups.order, plan.into_groups.order)
    moved = plan.to("meta")
    assert moved.cu_seqlens.is_meta and moved.from_groups.order.is_meta and moved.choice is None


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_it_is_traced_whole(backend):
    attend = torch.compile(sequence_attention, backend=backend, fullgraph=True)
    for lengths in ([16, 16, 8, 16], [4, 4, 4], [9]):
        plan = plan_sequences(lengths)
        resolve_sequences(plan, torch.device("cpu"), 8)
        q, k, v, grad = draw(1, 2, 2, sum(lengths), 8, torch.float32)
        expected = gradients(lambda *x, p=plan: sequence_attention(*x, p), q, k, v, grad)
        found = gradients(lambda *x, p=plan: attend(*x, p), q, k, v, grad)
        assert_near(found, expected, off=1e-6)


def test_flash_attn_is_called_without_a_mask(monkeypatch):
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k) == (10, 10)
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return one_sequence_after_the_other(q, k, v, *cu, softmax_scale, causal)[0]

    stub = stand_in("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    assert_kernel_is_right("flash_attn")


def test_torchs_own_is_called_without_a_mask(monkeypatch):
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **more):
        assert window_size == (-1, -1) and (max_q, max_k) == (10, 10)
        return one_sequence_after_the_other(q, k, v, cu_q.tolist(), cu_k.tolist(), scale, False)[0]

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    assert_kernel_is_right("varlen")


@pytest.fixture
def flash_attn_4(monkeypatch):
    """The package's two functions by explicit softmax; the sizes of heads that they were called with."""
    sizes = []

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, return_lse, **rest):
        sizes.append({x.shape[-1] for x in (q, k, v)})
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        found = one_sequence_after_the_other(q, k, v, *cu, softmax_scale, causal)
        return *found, None, None, None

    def backward(
        q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **rest
    ):
        sizes.append({x.shape[-1] for x in (q, k, v, out, dout)})
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return gradients_in_turn(q, k, v, dout, *cu, causal, scale=softmax_scale)

    stub = stand_in("interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, stand_in(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stub)
    return sizes


def test_flash_attn_4_is_called_without_a_mask(flash_attn_4):
    assert_kernel_is_right("flash_attn_4")
    assert flash_attn_4 == [{8}, {8}]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("dim", "wide"), [(72, 96), (80, 96), (64, 64)])
def test_flash_attn_4_with_padded_heads(flash_attn_4, monkeypatch, dim, wide, scale):
    """Output, gradients and log-sum-exp are those of the true size, and its scale."""
    major = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: major)
    right_size = varlen.right_size
    monkeypatch.setattr(varlen, "right_size", lambda d, _: right_size(d, torch.device("cuda")))
    assert_kernel_is_right("flash_attn_4", dim, scale)
    assert flash_attn_4 == [{wide}, {wide}]
    plan = plan_sequences([5, 1, 10])
    q, k, v, _ = draw(1, 4, 2, plan.rows, dim, torch.float64)
    _, expected = sequence_attention(q, k, v, plan, scale=scale, backend="sdpa", return_lse=True)
    choose_flash_attn_4(plan, dim)
    _, lse = sequence_attention(q, k, v, plan, scale=scale, return_lse=True)
    assert (lse - expected).abs().max() <= 1e-6  # FlashAttention's are float32


def test_padded_heads_are_traced_whole(flash_attn_4, monkeypatch):
    monkeypatch.setattr(varlen, "right_size", lambda size, device: 96)
    plan = plan_sequences([5, 1, 10])
    choose_flash_attn_4(plan, 80)
    q, k, v, grad = draw(1, 4, 2, plan.rows, 80, torch.float64)
    attend = torch.compile(
        lambda *x: sequence_attention(*x, plan), backend="aot_eager", fullgraph=True
    )
    expected = gradients(lambda *x: by_weights(*x, [5, 1, 10]), q, k, v, grad)
    assert_near(gradients(attend, q, k, v, grad), expected)
    assert flash_attn_4 == [{96}, {96}]


def choose_flash_attn_4(plan, dim):
    plan.choice = {torch.float64: "flash_attn_4"}
    plan.chosen_under = SEQUENCES.settings(dim, 0.0)


def assert_kernel_is_right(name, dim=8, scale=None):
    """As `sequence_attention` calls it, and computed by explicit softmax."""
    lengths = [5, 1, 10]
    plan = plan_sequences(lengths)
    q, k, v, grad = draw(1, 4, 2, plan.rows, dim, torch.float64)
    plan.choice = {torch.float64: name}
    plan.chosen_under = SEQUENCES.settings(dim, 0.0)
    found = gradients(lambda *x: sequence_attention(*x, plan, scale=scale), q, k, v, grad)
    assert_near(found, gradients(lambda *x: by_weights(*x, lengths, scale), q, k, v, grad))
