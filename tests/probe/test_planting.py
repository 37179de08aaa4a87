"""Each plant does what it says: compared bit by bit with the healthy model, without a probe."""

import pytest
from planting import PLANTS
from planting.trace import assert_planted

pytestmark = pytest.mark.adapter
CASES = [(name, family) for name, p in PLANTS.items() for family in p.families]


def test_there_are_many_plants():
    assert len(PLANTS) >= 40


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_plant_is_what_it_says(name, family):
    plant = PLANTS[name]
    seed = sum(map(ord, name + family)) % 97
    scene = plant.scene(family, seed)
    assert_planted(scene, plant.pair(scene))
