"""The rule by waves: on a CPU with transformers' function in the place of FLA's kernels; and which of both runs."""

import itertools
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.linear_attention import (
    OFFSETS,
    PARENTS,
    assert_near,
    for_each_value_head,
    inputs,
    of_transformers,
    rule_alone,
    values_and_gradients,
)

from mmpack.errors import BackendError, MissingExtraError
from mmpack.ops import invariance
from mmpack.ops.linear_attention import choose, plan_segments, segment_delta_rule, waves

CUDA = torch.device("cuda")


@pytest.fixture
def stand_in(monkeypatch):
    """`fla` with transformers' chunks behind FLA's signature, sequence by sequence; it notes its calls."""
    rule = of_transformers("torch_chunk_gated_delta_rule")
    rule = getattr(rule, "__wrapped__", rule)
    calls = []

    def chunk_gated_delta_rule(q, k, v, g, beta, **options):
        cu = options["cu_seqlens"].tolist()
        first, final = options["initial_state"], options["output_final_state"]
        calls.append((len(cu) - 1, first is not None, final, options["chunk_indices"].tolist()))
        out, states = [], []
        for s, (a, b) in enumerate(itertools.pairwise(cu)):
            made, state = rule(
                *for_each_value_head(x[:, a:b] for x in (q, k, v, g, beta)),
                initial_state=None if first is None else first[s : s + 1],
                output_final_state=final,
                use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
            )
            out.append(made)
            states.append(state)
        return torch.cat(out, 1), torch.cat(states) if final else None

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    return calls


def test_waves_are_the_paths_alone(stand_in):
    tensors = inputs(222, (2, 4), (16, 8))
    plan = plan_segments(np.array(OFFSETS), np.array(PARENTS))
    assert plan.order is not None  # rows of one depth do not lie together
    upstream = torch.randn(222, 4, 8, generator=torch.Generator().manual_seed(1))

    def run(x):
        return waves.delta_rule(*x, plan, 16**-0.5, True)

    found = values_and_gradients(run, tensors, upstream)
    wanted = values_and_gradients(
        lambda x: rule_alone(x, OFFSETS, PARENTS), [x.double() for x in tensors], upstream
    )
    assert_near(found, wanted, 2e-6)
    pairs = [wave.chunk_indices.tolist() for wave in plan.waves]
    begun = [True] * (len(plan.waves) - 1)
    sizes = [len(wave.cu_seqlens) - 1 for wave in plan.waves]
    assert stand_in == list(zip(sizes, [False, *begun], [*begun, False], pairs, strict=True))


def test_a_plain_pack_is_one_call_without_copies(stand_in):
    tensors = inputs(20, (1, 2), (4, 4))
    plan = plan_segments(np.array([0, 12, 20]), np.array([-1, -1]))
    out = waves.delta_rule(*tensors, plan, 0.5, True)
    assert plan.order is None and [call[:3] for call in stand_in] == [(2, False, False)]
    assert torch.allclose(out, segment_delta_rule(*tensors, plan), atol=1e-6)


def test_without_fla_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    tensors = inputs(20, (1, 2), (4, 4))
    plan = plan_segments(np.array([0, 20]), np.array([-1]))
    with pytest.raises(MissingExtraError, match=r"pip install 'mmpack\[fla\]'"):
        waves.delta_rule(*tensors, plan, 0.5, True)


@pytest.fixture
def machine(monkeypatch):
    """Sets which packages there are, and the GPU's capability."""

    def set_up(capability=(9, 0), **packages):
        monkeypatch.setattr(
            choose, "installed_version", lambda p: packages.get(p.replace("-", "_"))
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    monkeypatch.delenv(choose.VARIABLE, raising=False)
    return set_up


def test_auto(machine):
    machine(fla_core="0.6.0", triton="3.7.1")
    assert choose.choose(CUDA, torch.bfloat16) == "fla"
    assert choose.choose(CUDA, torch.float16) == "fla"
    for dtype in (torch.float32, torch.float64):
        assert choose.choose(CUDA, dtype) == "torch"
    assert choose.choose(torch.device("cpu"), torch.bfloat16) == "torch"
    assert choose.report(CUDA)[1:] == ("fla", "half precision on a GPU")


@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0", "3.7.0+git1"])
def test_the_triton_that_fla_refuses_on_hopper(machine, triton, monkeypatch):
    machine(fla_core="0.6.0", triton=triton)
    with pytest.raises(BackendError, match=r"refuses its backward on Hopper.*pip install tilelang"):
        choose.choose(CUDA, torch.bfloat16)
    assert choose.report(CUDA)[1] is None
    assert choose.choose(CUDA, torch.bfloat16, gradients=False) == "fla"
    machine(fla_core="0.6.0", triton=triton, tilelang="0.1.15")
    for nvcc in (True, False):
        backend = SimpleNamespace(TileLangBackend=SimpleNamespace(can_use=lambda found=nvcc: found))
        monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(backends=backend))
        monkeypatch.setitem(sys.modules, "fla.backends", backend)
        if nvcc:
            assert choose.choose(CUDA, torch.bfloat16) == "fla"
            continue
        with pytest.raises(BackendError, match=r"Fix: pip install tilelang, with nvcc \("):
            choose.choose(CUDA, torch.bfloat16)
    machine((10, 0), fla_core="0.6.0", triton=triton)
    assert choose.choose(CUDA, torch.bfloat16) == "fla"


def test_what_can_not_run_is_one_line(machine, monkeypatch):
    machine()
    with pytest.raises(
        BackendError, match=r"fla-core is not installed. Fix: pip install 'mmpack\[fla\]'"
    ):
        choose.choose(CUDA, torch.bfloat16)
    machine(fla_core="0.6.0", triton="3.7.1")
    with pytest.raises(BackendError, match="it needs a GPU, not cpu"):
        choose.choose(torch.device("cpu"), torch.bfloat16, asked="fla")
    with pytest.raises(BackendError, match=r"it can't take torch.float64"):
        choose.choose(CUDA, torch.float64, asked="fla")
    with pytest.raises(BackendError, match="keys have 512 dimensions"):
        choose.choose(CUDA, torch.bfloat16, 512)
    monkeypatch.setenv(choose.VARIABLE, "torch")
    assert choose.choose(CUDA, torch.bfloat16) == "torch"
    assert choose.choose(CUDA, torch.bfloat16, asked="fla") == "fla"
    assert choose.report(CUDA)[1:] == ("torch", "MMPACK_LINEAR_ATTENTION=torch")
    monkeypatch.setenv(choose.VARIABLE, "quick")
    with pytest.raises(BackendError, match="'quick' is not a backend"):
        choose.choose(CUDA, torch.bfloat16)


def test_the_invariant_mode(machine, monkeypatch):
    machine(fla_core="0.6.0", triton="3.7.1")
    monkeypatch.setattr(invariance, "_depth", 1)
    assert choose.choose(torch.device("cpu"), torch.bfloat16) == "torch"
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(BackendError, match=r"leave batch_invariant"):
            choose.choose(CUDA, dtype)
