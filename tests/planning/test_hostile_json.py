"""A plan, a cost or a config that is no such file ends in one line, also where its brackets never end."""

import json

import pytest
from support.process import call_mmpack
from support.samples import make_sample

import mmpack as mp
from mmpack.cli.plan import MAX_CONFIG
from mmpack.planning import CostModel
from mmpack.planning.cost import FORMAT

DEEP = "[" * 200_000
LONG = json.dumps({"format": FORMAT, "spans": {"a\nb" * 2000: 1}})
HOSTILE = (
    LONG,
    DEEP,
    '{"a":' * 200_000,
    "\0",
    "\ud800".encode("utf-8", "surrogatepass"),
    "NaN",
    "[1]",
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_plan_no_cost_no_config(tmp_path, text):
    path, trace = tmp_path / "file.json", tmp_path / "t.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    mp.write_trace(trace, [make_sample([("text", [1]), ("response", [2])])])
    for load in (CostModel.load, mp.Plan.load):
        with pytest.raises(mp.PlanError, match="Fix: ") as caught:
            load(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    for option in ("--model", "--cost"):
        result = call_mmpack("plan", trace, "--max-tokens", "99", option, path)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_config_is_read_up_to_a_limit(tmp_path):
    trace = tmp_path / "t.jsonl"
    mp.write_trace(trace, [make_sample([("text", [1]), ("response", [2])])])
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG + 1)
    result = call_mmpack("plan", trace, "--max-tokens", "99", "--model", tmp_path)
    assert result.returncode == 2 and "can't be read" in result.stderr
