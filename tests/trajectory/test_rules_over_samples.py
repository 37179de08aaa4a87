"""MM213 and MM214: what no sample shows by itself. A trace that to_samples made breaks neither."""

import dataclasses
import json

import pytest
from support.process import call_mmpack
from support.trajectories import episode, grown

import mmpack as mp
from mmpack.trajectory import Turn, to_samples


def renamed(samples, suffix):
    return [dataclasses.replace(s, sample_id=s.sample_id + suffix) for s in samples]


def codes(samples):
    return [(p.code, p.sample_id, p.field) for p in mp.validate(samples)]


@pytest.mark.parametrize("merge", [True, False])
def test_the_same_loss_in_two_samples_is_named(merge):
    trajectory = episode(grown(3))
    long, per_turn = to_samples(trajectory), to_samples(trajectory, merge=False)
    assert codes(long) == codes(per_turn) == []
    again = renamed(per_turn if merge else long, "-again")
    found = codes([*long, *again]) if merge else codes([*per_turn, *again])
    if merge:
        assert found == [("MM213", f"e/{k}-again", "loss_spans[0]") for k in range(3)]
    else:
        assert found == [("MM213", "e/0-again", f"loss_spans[{k}]") for k in range(3)]


def test_two_groups(tmp_path):
    samples = [
        s
        for group in "ab"
        for s in renamed(
            to_samples(dataclasses.replace(episode([Turn([1], [2])]), group_id=group)), group
        )
    ]
    assert codes(samples) == [("MM214", "e/0b", "trajectory_id")]
    path = tmp_path / "t.jsonl"
    mp.write_trace(path, samples)
    result = call_mmpack("validate", path, "--json")
    assert result.returncode == 1 and json.loads(result.stdout)["codes"] == {"MM214": 1}
