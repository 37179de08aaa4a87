"""Which attention runs, of packed rows and of towers: by device, dtype, head size, packages and measured cost."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.attention import dense, draw, gradients, packages_on_the_cpu, packed, sees
from support.benchmarks import FOLDER, benchmark
from support.lines import TREES, plan_of

from mmpack.errors import BackendError
from mmpack.ops import invariance
from mmpack.ops.attention import (
    SEQUENCES,
    TREE,
    choose,
    plan_sequences,
    plan_tiles,
    resolve,
    resolve_sequences,
    sequence_attention,
    tree_attention,
    varlen,
    without_cudnn,
)

CPU, HALF = torch.device("cpu"), torch.bfloat16
SHARED = [(5, [3, (2, [4, 1, 1]), 6]), 7, (1, [1, 1]), (4, [2])]
each_chooser = pytest.mark.parametrize("chooser", [TREE, SEQUENCES], ids=["tree", "sequences"])


def install(monkeypatch, *packages):
    monkeypatch.setattr(choose, "INSTALLED", {p: p in packages for p in choose.INSTALLED})


def capability(monkeypatch, *numbers):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: numbers)


@pytest.fixture
def hopper(monkeypatch):
    """As if a Hopper GPU were here with every package."""
    capability(monkeypatch, 9, 0)
    install(monkeypatch, *choose.INSTALLED)
    for chooser in (TREE, SEQUENCES):
        monkeypatch.delenv(chooser.variable, raising=False)
    return torch.device("cuda")


@pytest.fixture
def ran(hopper, monkeypatch):
    """The kernels of sequences that run, as if the CPU were the GPU; they compute on the CPU."""
    names, able = [], choose.Chooser.why_not
    monkeypatch.setattr(
        choose.Chooser, "why_not", lambda self, name, _, *rest: able(self, name, hopper, *rest)
    )
    packages_on_the_cpu(monkeypatch, [])
    kernels = varlen.KERNELS | {"varlen": varlen.KERNELS["flash_attn"]}
    for name, kernel in kernels.items():
        monkeypatch.setitem(
            varlen.KERNELS, name, lambda *x, n=name, f=kernel, **o: (names.append(n), f(*x, **o))[1]
        )
    install(monkeypatch, "torch", "flash-attn")
    return names


def offered(chooser=TREE):
    """Those that `auto` may take."""
    return [name for name, backend in chooser.backends.items() if not backend.only_named]


def test_the_cheapest_that_can_run_is_chosen(hopper, monkeypatch):
    _, plan, _ = packed([(200, [50, 60])])
    chosen = TREE.choices(plan, hopper, 128)
    ranked = sorted(offered(), key=lambda name: TREE.backends[name].cost(plan))
    assert chosen[HALF] == chosen[torch.float16] == ranked[0]
    assert chosen[torch.float32] == chosen[torch.float64] == "sdpa"
    without = TREE.choices(plan, hopper, 128, 0.0, ranked[:2])
    assert without[HALF] == ranked[2] and without[torch.float32] == "sdpa"
    install(monkeypatch, "torch")
    assert TREE.choices(plan, hopper, 128)[HALF] == "varlen"
    for device, dim, dropout in ((hopper, 12, 0.0), (hopper, 128, 0.1), (CPU, 128, 0.0)):
        assert TREE.choices(plan, device, dim, dropout)[HALF] == "sdpa"


@pytest.mark.parametrize("dim", [64, 72, 80])
def test_what_towers_take(hopper, dim, monkeypatch):
    """What was measured fastest: short windows and frames, long pictures; equal lengths, and others."""
    kinds = {
        "windows": plan_sequences([64] * 256),
        "ragged windows": plan_sequences([64, 64, 32] * 64),
        "frames": plan_sequences([98] * 128),
        "pictures": plan_sequences([3136] * 4),
        "other pictures": plan_sequences([3136, 1024, 4096]),
        "tiles": plan_tiles(20, 1025, "cpu"),
    }

    def taken(*packages):
        install(monkeypatch, *packages)
        return {k: SEQUENCES.choices(p, hopper, dim)[HALF] for k, p in kinds.items()}

    large = dict.fromkeys(("pictures", "other pictures", "tiles"), "flash_attn_4")
    assert taken("torch", "triton") == dict.fromkeys(kinds, "varlen")
    assert taken("torch", "flash-attn") == dict.fromkeys(kinds, "flash_attn")
    assert taken("torch", "flash-attn-4") == dict.fromkeys(kinds, "varlen") | large
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert taken("torch", "flash-attn-4") == dict.fromkeys(kinds, "varlen") | large


def test_the_fastest_of_the_measured_is_chosen_and_padding_has_its_price(hopper, monkeypatch):
    """Of the shapes of benchmarks/tower_attention.py, by its results."""
    module = benchmark("tower_attention")
    path = FOLDER / "results" / "tower_attention.json"
    install(monkeypatch, "torch", "triton", "flash-attn-4")
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["backend"] != module.PEER:
            found.setdefault(row["shape"], []).append((row["forward_backward_ms"], row["backend"]))
    assert len(found) == 7
    for shape, times in found.items():
        dim, lengths = module.SHAPES[shape]
        plan = plan_sequences(lengths)
        assert SEQUENCES.choices(plan, hopper, dim)[HALF] == min(times)[1], shape
    plan = plan_sequences([288] * 64)  # FlashAttention-4 is the fastest only without padding
    taken = {dim: SEQUENCES.choices(plan, hopper, dim)[HALF] for dim in (64, 72)}
    assert taken == {64: "flash_attn_4", 72: "varlen"}
    capability(monkeypatch, 10, 0)
    assert SEQUENCES.choices(plan, hopper, 72)[HALF] == "flash_attn_4"


SIZES = range(16, 129, 8)
# up to 16 by one kernel of the backward, up to 32 by the others
ROUNDED_TWO_WAYS = [d for d in SIZES if -(-d // 16) * 16 != -(-d // 32) * 32]


def test_heads_that_are_rounded_two_ways_on_hopper(hopper, monkeypatch):
    """Those of text are refused, those of towers padded. Blackwell's kernels agree."""
    kinds = (TREE, "flash_attn_4"), (TREE, "flex_flash"), (SEQUENCES, "flash_attn_4")

    def refused(table, name):
        return [d for d in SIZES if table.why_not(name, hopper, HALF, d) is not None]

    assert [refused(*kind) for kind in kinds] == [ROUNDED_TWO_WAYS] * 2 + [[]]
    major = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: major)
    found = {d: varlen.right_size(d, hopper) for d in SIZES}
    assert [d for d, wide in found.items() if wide != d] == ROUNDED_TWO_WAYS
    assert (found[72], found[80], found[16], found[104]) == (96, 96, 32, 128)
    assert not set(found.values()) & set(ROUNDED_TWO_WAYS)
    assert varlen.right_size(80, CPU) == 80
    capability(monkeypatch, 10, 0)
    major.major = 10
    assert [refused(*kind) for kind in kinds] == [[]] * 3
    assert all(varlen.right_size(d, hopper) == d for d in SIZES)


def test_why_a_backend_cannot_run(hopper, monkeypatch):
    assert set(TREE.explain(hopper).values()) == {None}
    plan = plan_of(TREES, 4, False)
    for name, device, dtype, dim, rest, why in (
        ("varlen", hopper, torch.float32, 128, (), "varlen can't take torch.float32"),
        ("flash_attn_4", hopper, HALF, 12, (), "can't take heads of 12"),
        ("flex", hopper, HALF, 64, (0.1,), "has no dropout"),
        ("fixed_blocks", CPU, torch.float32, 80, (0.1,), "has no dropout"),
        ("fixed_blocks", CPU, torch.float32, 512, (), "can't take heads of 512"),
        ("fixed_blocks", CPU, torch.float32, 8, (0.0, plan), "keeps to no sliding window"),
        ("varlen", CPU, HALF, 64, (), "needs a CUDA device, not cpu"),
    ):
        assert why in TREE.why_not(name, device, dtype, dim, *rest)
    assert TREE.why_not("fixed_blocks", CPU, torch.float32, 80) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "no deterministic backward" in TREE.why_not("flex_flash", hopper, HALF, 64)
    assert TREE.why_not("flash_attn_4", hopper, HALF, 64) is None
    capability(monkeypatch, 8, 6)
    assert "9.0, the device has 8.6" in TREE.why_not("flash_attn_4", hopper, HALF, 64)
    install(monkeypatch)
    assert TREE.explain(hopper)["flash_attn"] == "flash-attn is not installed"
    assert TREE.explain(hopper)["sdpa"] is None


@each_chooser
def test_report(chooser, hopper, monkeypatch):
    able = ", ".join(["sdpa", *offered(chooser)])
    if chooser is SEQUENCES:
        able = "sdpa, flash_attn_4, flash_attn, varlen"
    assert chooser.report(hopper) == (chooser.what, able, "the cheapest for each batch")
    monkeypatch.setenv(chooser.variable, "varlen")
    assert chooser.report(hopper)[1:] == ("varlen", f"{chooser.variable}=varlen")
    _, backend, why = chooser.report(CPU)
    assert backend is None and f"needs a CUDA device, not cpu. Fix: set {chooser.variable}" in why
    monkeypatch.setenv(chooser.variable, "fast")
    assert chooser.report(hopper)[1] is None
    assert "'fast' is not a backend" in chooser.report(hopper)[2]


@each_chooser
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("varlen", "varlen was requested, but varlen needs a CUDA device, not cpu"),
        ("flash_attn", "flash-attn is not installed. Fix: set .*=auto"),
        ("triton", "'triton' is not a backend. Fix: set .*=auto, or one of sdpa, "),
    ],
)
def test_a_forced_backend_that_cannot_run_is_an_error(chooser, name, message, monkeypatch):
    install(monkeypatch, "torch")
    q, k, v, _ = draw(1, 2, 2, 7, 8, torch.float32)
    until, plan, _ = packed([3, 4])

    def attend(**options):
        if chooser is TREE:
            return tree_attention(q, k, v, until, plan, **options)
        return sequence_attention(q, k, v, plan_sequences([3, 4]), **options)

    with pytest.raises(BackendError, match=message):
        attend(backend=name)
    monkeypatch.setenv(chooser.variable, name)
    with pytest.raises(BackendError, match=message):
        attend()
    with pytest.raises(BackendError, match=message):
        if chooser is TREE:
            resolve(plan, until, 8)
        else:
            resolve_sequences(plan_sequences([3, 4]), CPU, 8)
    if chooser is TREE:
        with pytest.raises(BackendError):  # also without a plan
            tree_attention(q, k, v, until)


def test_a_dtype_or_window_that_the_forced_backend_cannot_take_is_an_error(hopper, monkeypatch):
    monkeypatch.setenv("MMPACK_ATTENTION", "varlen")
    until, plan, rows = packed([3, 4])
    plan.choice = TREE.choices(plan, hopper, 8)
    assert plan.choice == dict.fromkeys(choose.HALF, "varlen")
    q, k, v, _ = draw(1, 2, 2, len(rows), 8, torch.float32)
    with pytest.raises(BackendError, match=r"varlen needs a CUDA device"):
        tree_attention(q, k, v, until, plan)
    with pytest.raises(BackendError, match=r"varlen can't take torch.float32"):
        TREE.demand("varlen", hopper, torch.float32, 8)
    monkeypatch.setenv("MMPACK_ATTENTION", "fixed_blocks")
    with pytest.raises(BackendError, match=r"sliding window, which the model has.*Fix"):
        TREE.choices(plan_of(TREES, 4, False), CPU, 8)
    assert set(TREE.choices(plan_of(TREES, None, True), CPU, 8).values()) == {"fixed_blocks"}


def test_a_plan_follows_the_present_settings(ran, monkeypatch):
    until, plan, rows = packed([(3, [2, 4])])

    def attend(dim=8, **options):
        before = len(ran)
        q, k, v, _ = draw(1, 4, 2, len(rows), dim, HALF)
        tree_attention(q, k, v, until, plan, **options)
        return ran[-1] if len(ran) > before else "sdpa"

    assert attend() == "flash_attn"
    assert attend(dim=12) == "sdpa"
    assert attend() == "flash_attn"
    assert attend(dropout=0.5) == "sdpa"
    assert attend(backend="varlen") == "varlen"
    monkeypatch.setenv("MMPACK_ATTENTION", "varlen")
    assert attend() == "varlen"
    with pytest.raises(BackendError, match="varlen can't take heads of 12"):
        attend(dim=12)
    with pytest.raises(BackendError, match="varlen has no dropout"):
        attend(dropout=0.5)
    monkeypatch.setenv("MMPACK_ATTENTION", "flash_attn_4")
    with pytest.raises(BackendError, match="flash-attn-4 is not installed"):
        attend()
    monkeypatch.setenv("MMPACK_ATTENTION", "sdpa")
    assert attend() == "sdpa"
    install(monkeypatch, *choose.INSTALLED)
    monkeypatch.setenv("MMPACK_ATTENTION", "flex_flash")
    resolve(plan, until, 64)
    assert plan.choice[HALF] == "flex_flash"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(BackendError, match="flex_flash has no deterministic backward"):
        resolve(plan, until, 64)
    monkeypatch.delenv("MMPACK_ATTENTION")
    resolve(plan, until, 64)
    assert "flex_flash" not in plan.choice.values()


def test_autocast_chooses_for_the_dtype_that_is_computed_in(ran):
    until, plan, rows = packed(SHARED)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float32)
    with torch.autocast("cpu", dtype=HALF):
        found = gradients(lambda *x: tree_attention(*x, until, plan), q, k, v, grad.bfloat16())
    assert ran == ["flash_attn"] and found[0].dtype == HALF
    assert [x.dtype for x in found[1:]] == [torch.float32] * 3
    low = [x.bfloat16().double() for x in (q, k, v, grad)]
    for a, b in zip(found, gradients(lambda *x: dense(*x, sees(until))[0], *low), strict=True):
        assert (a.double() - b).norm() <= 2e-2 * b.norm()
    tree_attention(q, k, v, until, plan)
    assert ran == ["flash_attn"]


def test_a_backend_without_log_sum_exp_is_left_out_or_refused_by_name(ran, monkeypatch):
    install(monkeypatch, *choose.INSTALLED)
    until, plan, _ = packed([64, 64])
    q, k, v, _ = draw(1, 4, 4, 128, 64, torch.float16)
    plan.choice = dict.fromkeys(choose.DTYPES, "flex_flash")
    plan.chosen_under = TREE.settings(64, 0.0)
    _, lse = tree_attention(q, k, v, until, plan, return_lse=True)
    assert ran == ["flash_attn_4"]
    _, expected = dense(q.double(), k.double(), v.double(), sees(until))
    assert (lse - expected).abs().max() <= 1e-2  # the stand-in computes in fp16
    message = r"flex_flash was requested, but returns no log-sum-exp. Fix: use one of sdpa, flash"
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, until, plan, backend="flex_flash", return_lse=True)
    monkeypatch.setenv("MMPACK_ATTENTION", "flex_flash")
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, until, plan, return_lse=True)


@each_chooser
def test_fixed_blocks_run_by_name_alone(chooser):
    assert chooser.wanted() == "auto"
    invariance.enter()
    try:
        assert chooser.wanted() == "fixed_blocks"
        with pytest.raises(BackendError, match="no dropout"):
            chooser.choices(plan_sequences([3]), CPU, 80, 0.1)
    finally:
        invariance.leave()


@pytest.mark.parametrize("dynamic", [None, True])
def test_tiles_choose_while_torch_compile_traces(hopper, dynamic):
    """Their plan is made within the graph."""

    def chosen(x):
        plan = plan_tiles(x.shape[0], x.shape[1], x.device)
        return SEQUENCES.choices(plan, hopper, 64)[HALF]

    torch._dynamo.reset()
    traced = torch.compile(chosen, backend="eager", fullgraph=True, dynamic=dynamic)
    for rows in (257, 1025, 2048):
        x = torch.ones(30, rows)
        assert traced(x) == chosen(x) == ("flash_attn" if rows < 1024 else "flash_attn_4")


def test_cudnn_is_left_out_for_halves_on_a_gpu(monkeypatch):
    """Everything else is torch's choice."""

    def found(query, key, value, **options):
        return torch.backends.cuda.cudnn_sdp_enabled(), options

    monkeypatch.setattr(without_cudnn, "scaled_dot_product_attention", found)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for device, dtype, allowed in (
        ("cuda", HALF, False),
        ("cuda", torch.float16, False),
        ("cuda", torch.float32, True),
        ("cpu", HALF, True),
    ):
        query = SimpleNamespace(device=torch.device(device), dtype=dtype)
        assert without_cudnn.attend(query, None, None, scale=2.0) == (allowed, {"scale": 2.0})
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
