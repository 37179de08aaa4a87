"""The FLOPs of a step, against torch's own counter over a real forward and backward."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step.models import MODELS
from benchmarks.step.padded import padded
from benchmarks.step.step import Options, case_of
from benchmarks.step.work import Work, step_flops, tower_pairs

CPU = torch.device("cpu")


def counted(call):
    """FLOPs of attention and of all other products, as torch counts what runs."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = by_op.pop("aten.bmm")
    return attention, sum(by_op.values())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
@pytest.mark.parametrize("workload", ["pictures", "video"])
def test_flops_are_those_that_torch_counts(name, workload):
    case = case_of(Options([name], [workload], ["padded"], tiny=True), name, workload, CPU)
    model, members = case.build(), case.job.groups()[0]
    work = padded(model, case.job, members).work
    attention, products = counted(lambda: padded(model, case.job, members).loss.backward())
    flops = step_flops(model, [work], head_again=False)
    assert products == flops.layers + flops.head + flops.tower - flops.left_out
    # plain attention computes what causal rows do not see, and does not make its scores again
    pairs = work.rows**2 // len(members)
    every = step_flops(model, [Work(0, pairs, 0, work.grids)])
    assert attention * 4.5 / 4 == every.attention + every.tower_attention


def test_a_head_that_makes_its_logits_again():
    case = case_of(Options(["qwen2.5-vl-7b"], ["geo"], [], tiny=True), "qwen2.5-vl-7b", "geo", CPU)
    work = Work(8, 36, 3, [])
    model = case.build()
    kept, again = (step_flops(model, [work], head_again=a).head for a in (False, True))
    assert again - kept == 2 * 3 * model.lm_head.weight.numel()


@pytest.mark.slow
def test_kept_layers_run_once():
    case = case_of(Options(["qwen3-vl-8b"], ["geo"], [], tiny=True), "qwen3-vl-8b", "geo", CPU)
    model, members = case.build(), case.job.groups()[0]
    work = padded(model, case.job, members).work
    kept = replace(work, kept_layers=3, kept_blocks=1)
    for layer in [*model.model.language_model.layers[-3:], model.model.visual.blocks[-1]]:
        layer.gradient_checkpointing = False
    _, products = counted(lambda: padded(model, case.job, members).loss.backward())
    flops = step_flops(model, [kept], head_again=False)
    assert products == flops.layers + flops.head + flops.tower - flops.left_out
    whole = step_flops(model, [work], head_again=False)
    assert flops.attention / whole.attention == (4 * 4.5 - 3) / (4 * 4.5)
    assert flops.tower_attention / whole.tower_attention == (4 * 4.5 - 1) / (4 * 4.5)


def test_windows_are_cut_at_the_edge():
    sizes = {"depth": 3, "window_size": 112, "patch_size": 14, "spatial_merge_size": 2}
    vision = type("Vision", (), sizes | {"model_type": "qwen2_5_vl"})
    vision.fullatt_block_indexes = [1]
    # 12 × 20 patches in windows of 8 × 8: sides 8, 4 and 8, 8, 4
    windows = sum((a * b) ** 2 for a in (8, 4) for b in (8, 8, 4))
    assert tower_pairs(vision, [(2, 12, 20)]) == [2 * windows, 2 * 240**2, 2 * windows]


@pytest.mark.parametrize("name", MODELS)
def test_the_real_shapes_have_their_names_parameters(name):
    from benchmarks.step.models import build

    billions = sum(p.numel() for p in build(name, torch.device("meta")).parameters()) / 1e9
    assert billions == pytest.approx({"7b": 8.29, "3b": 4.07, "8b": 8.77}[name[-2:]], abs=0.01)
