"""A plan, a cost or a config that is no such file ends in one line, also where its brackets never end."""

import copy
import functools
import json
import math
import re

import pytest
from support.kits import get_kit
from support.process import call_mmpack
from support.samples import make_sample

import mmpack as mp
from mmpack.cli.plan import MAX_CONFIG
from mmpack.planning import CostModel
from mmpack.planning.cost import FORMAT, cost_model
from mmpack.planning.memory import largest_pack

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


ODD = (
    None,
    True,
    -1,
    0.5,
    -0.5,
    2**53,
    2**63,
    10**400,
    5e-324,
    1e308,
    1e999,
    "x",
    [],
    {},
    [None],
    {"a": 1},
)


def places(value, path=()):
    """The path of every value within parsed JSON."""
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else listed:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_a_saved_plan_with_one_odd_value_is_refused_or_drawn(tmp_path):
    """Each value in turn: a plan that loads is one that can be shown."""
    samples = [
        make_sample([("text", [1, 2]), ("response", [3])], sample_id=f"{i}") for i in range(3)
    ]
    samples[2].loss_spans[0].stop = 9
    path, drawn = tmp_path / "plan.json", 0
    mp.plan(samples, max_tokens=6, ranks=2, share_prefix=True, on_invalid="drop").save(path)
    whole = json.loads(path.read_text())
    assert whole["dropped"] and whole["stats"]["rows_shared"]
    for at in list(places(whole)):
        for odd in (*ODD, "gone"):
            document = copy.deepcopy(whole)
            holder = functools.reduce(lambda found, key: found[key], at[:-1], document)
            holder[at[-1]] = odd
            if odd == "gone":
                del holder[at[-1]]
            path.write_text(json.dumps(document))
            try:
                plan = mp.Plan.load(path)
            except mp.PlanError as error:
                assert "\n" not in str(error) and "Fix: " in str(error) and len(str(error)) < 1000
                continue
            repr(plan)
            html = mp.view.html(plan)
            drawn += 1
            assert not re.search(r"=\"-?(nan|inf)", html), (at, odd)
    assert drawn > 100


def test_a_config_with_one_odd_value_is_refused_or_counted():
    if not get_kit("gemma4").available:
        pytest.skip("this transformers has no Gemma 4")
    whole = get_kit("gemma4").model_config().to_dict()
    counted = 0
    for at in list(places(whole)):
        for odd in (-1, 0, 0.5, math.nan, 2**63, "x", [], "gone"):
            document = copy.deepcopy(whole)
            holder = functools.reduce(lambda found, key: found[key], at[:-1], document)
            holder[at[-1]] = odd
            if odd == "gone":
                del holder[at[-1]]
            for count in (cost_model, lambda config: largest_pack(config, 10**10, patches=1.0)):
                try:
                    count(document)
                    counted += 1
                except mp.ArgumentError as error:
                    assert "\n" not in str(error) and "Fix: " in str(error)
    assert counted > 200


def test_a_config_is_read_up_to_a_limit(tmp_path):
    trace = tmp_path / "t.jsonl"
    mp.write_trace(trace, [make_sample([("text", [1]), ("response", [2])])])
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG + 1)
    result = call_mmpack("plan", trace, "--max-tokens", "99", "--model", tmp_path)
    assert result.returncode == 2 and "can't be read" in result.stderr
