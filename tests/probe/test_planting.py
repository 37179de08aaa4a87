"""Each plant does what it says: compared bit by bit with the healthy model, without a probe."""

import pytest
from planting import PLANTS
from planting.trace import assert_planted, assert_read

CASES = [
    pytest.param(
        name,
        family,
        marks=pytest.mark.adapter if k == i % len(p.families) and i % 3 == 0 else pytest.mark.slow,
    )
    for i, (name, p) in enumerate(PLANTS.items())
    for k, family in enumerate(p.families)
    if k == i % len(p.families)
    or k % 3 == (i + 1) % 3  # those that test_planted_faults.py looks for
]


def test_there_are_many_plants():
    assert len(PLANTS) >= 40


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_plant_is_what_it_says(name, family):
    plant = PLANTS[name]
    scene = plant.scene(family, seed=sum(map(ord, name + family)) % 97)
    assert_read(scene, plant) if plant.side else assert_planted(scene, plant.pair(scene))
