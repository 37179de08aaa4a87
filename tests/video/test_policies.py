"""Each policy against what upstream's own functions chose, recorded by `fixtures/video/regenerate.py`."""

import json
from pathlib import Path

import pytest
from support.video_infos import clip

from mmpack.errors import ArgumentError
from mmpack.video import sample
from mmpack.video.policies.registry import POLICIES

TABLES = Path(__file__).resolve().parents[2] / "fixtures" / "video"


def rows(policy):
    return json.loads((TABLES / f"{policy}.json").read_text())


def differences(policy, row):
    """(field, ours, upstream's) of all that differ; an error equals an error."""
    expected = row["upstream"]
    try:
        plan = sample(clip(*row["video"]), policy=policy, **row["settings"]).to_dict()
    except ArgumentError as error:
        assert "\n" not in str(error) and "Fix: " in str(error)
        return [] if "error" in expected else [("error", str(error), expected)]
    if "error" in expected:
        return [("error", plan["indices"], expected)]
    fps = None if plan["fps_assumed"] and expected["fps"] is None else plan["fps"]
    mine = plan | {"fps": fps}
    if "written" in expected:
        mine["written"] = [f"{t:.1f}" for t in plan["patch_timestamps"]]
    for name in ("second_per_grid_ts", "patch_timestamps"):
        assert (mine[name] is None) == (name not in expected), name
    return [(k, mine[k], v) for k, v in expected.items() if mine[k] != v]


# beside the real functions themselves: test_policies_glm.py, tests/processors/test_gemma.py
ELSEWHERE = ("transformers_glm4v", "transformers_glm46v", "transformers_uniform")


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ELSEWHERE])
def test_recorded_upstream(policy):
    table = rows(policy)
    wrong = [(row["video"], row["settings"], d) for row in table if (d := differences(policy, row))]
    assert not wrong, f"{len(wrong)} of {len(table)}: {wrong[:3]}"
    raised = sum("error" in row["upstream"] for row in table)
    assert len(table) > 200 and 5 <= raised < len(table) / 3
