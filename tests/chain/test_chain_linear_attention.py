"""The chain of a tiny Qwen3.5: layouts are within the contract, a leak of state is named, what can't run is said."""

import pytest
import torch
from chain.job import Options, chain

from mmpack.errors import ArgumentError
from mmpack.ops.linear_attention import plan_segments
from mmpack.packing import segments

pytestmark = pytest.mark.slow


def test_layouts_are_within_the_contract():
    report = chain(Options("qwen3.5", axes=["padding", "packed", "shared", "prefix_cache"]))
    assert report.ok, list(report.lines())
    stages = {(r.axis, r.stage) for r in report.rows if not r.not_run}
    for axis in ("padding", "packed", "shared"):
        assert {(axis, s) for s in ("qkv", "rotary", "attention", "o", "logprob")} <= stages
    kinds = {(r.stage, r.kind) for r in report.rows if r.axis == "shared"}
    for name in ("A_log", "dt_bias", "conv1d.weight"):
        assert ("attention", f"layers.*.linear_attn.{name}") in kinds
    assert "whose state is not KV per token" in report.left_out["prefix_cache"]


def test_a_leak_of_state_is_named(monkeypatch):
    """Branches that start from nothing; samples alone are as they were."""
    monkeypatch.setattr(
        segments,
        "plan_segments",
        lambda offsets, parents, padding: plan_segments(offsets, parents * 0 - 1, padding),
    )
    report = chain(Options("qwen3.5", axes=["packed", "shared"]))
    beyond = {(r.axis, r.stage) for r in report.beyond if r.direction == "forward"}
    assert not report.ok and {axis for axis, _ in beyond} == {"shared"}
    assert ("shared", "attention") in beyond and ("shared", "merge") not in beyond


def test_tensor_parallel_is_refused():
    with pytest.raises(ArgumentError, match="linear attention, which tensor_parallel can't split"):
        chain(Options("qwen3.5", axes=["tensor_parallel"]))
    assert torch.distributed.is_initialized() is False
