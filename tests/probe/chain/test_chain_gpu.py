"""The chain on a GPU: tiny models in both dtypes, two layers at real widths in bfloat16, and the invariant mode."""

import pytest
import torch

from mmpack.bench.chain import ONE_PROCESS, Options, chain
from mmpack.probe.chain.stages import STAGES

pytestmark = pytest.mark.gpu
MODELS = ["qwen2.5-vl", "qwen3-vl"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_tiny(model, dtype):
    report = chain(Options(model, dtype=dtype, device="cuda", axes=ONE_PROCESS))
    assert report.ok, list(report.lines())
    assert {row.stage for row in report.rows if not row.not_run} == set(STAGES)


@pytest.mark.alone  # 30 GB
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_real_widths(model):
    torch.cuda.reset_peak_memory_stats()
    axes = ["padding", "packed", "shared", "prefix_cache"]
    report = chain(Options(model, "layer", "bfloat16", "cuda", axes))
    assert report.ok, list(report.lines())
    assert report.seconds < 90 and torch.cuda.max_memory_allocated() < 60e9


@pytest.mark.parametrize("model", MODELS)
def test_invariant(model):
    axes = ["batch", "padding", "packed", "shared"]
    report = chain(Options(model, dtype="bfloat16", device="cuda", axes=axes, invariant=True))
    assert report.ok, list(report.lines())
    assert any(row.allowed == 0 for row in report.rows)
