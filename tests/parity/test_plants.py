"""Differences planted by real processors: what proves them names them, all else is `unknown` with what is possible.

`python -m support.planting.plants` counts, run in `tests/`.
"""

import pytest
import transformers
from packaging.version import Version
from support.planting.plants import PLANTS
from support.planting.plants_hard import HARD
from support.planting.registry import verdicts

import mmpack as mp


@pytest.mark.parametrize("name", [*PLANTS, *HARD])
def test_each_plant_is_named_or_unknown(name):
    plant = (PLANTS | HARD)[name]
    if name in PLANTS and "alpha" in name and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this transformers drops transparency, so that nothing differs")
    expected = "honest" if plant.honest or not plant.truth else "right"
    for said, report in verdicts(plant):
        assert said == ("fine" if plant.harmless else expected), "\n".join(report.lines())


def test_one_sample_of_several_has_its_own_cause():
    names = ["the same", "jpeg 2", "truncated at text", "another response"]
    pairs = [PLANTS[name].make() for name in names]
    for k, pair in enumerate(pairs):
        for sample in pair:
            sample.sample_id = f"s{k}"
    report = mp.compare([left for left, _ in pairs], [right for _, right in reversed(pairs)])
    assert {f.sample_id: f.cause for f in reversed(report.findings)} == {
        "s1": "jpeg_reencode",
        "s2": "truncated",
        "s3": "unknown",
    }
    assert report.first.sample_id == "s1" and report.first.index == 2
