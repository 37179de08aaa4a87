"""The chain's axis of split rows: every stage of the text model within the contract, by gloo on the CPU."""

import pytest
from chain.__main__ import axes_of
from chain.job import Options, chain
from chain.stages import STAGES, TOWER

AXIS = "sequence_parallel"


@pytest.mark.slow
def test_rows_over_two_ranks():
    report = chain(Options("qwen3-vl", layers=2, axes=[AXIS]))
    assert report.ok, list(report.lines())
    found = {(r.stage, r.direction) for r in report.rows if (r.axis, r.value) == (AXIS, "2")}
    for stage in set(STAGES) - set(TOWER):
        assert {(stage, "forward"), (stage, "backward")} <= found, stage
    assert {("tower", "weights"), ("mlp", "weights"), ("o", "weights")} <= found


def test_the_axis_runs_where_it_is_asked_for():
    assert axes_of(None, [2]) == ["tensor_parallel", "fsdp"]
    assert axes_of([AXIS], [2]) == [AXIS, "tensor_parallel", "fsdp"] and axes_of([AXIS], None) == [
        AXIS
    ]
    assert AXIS not in axes_of(None, None)
