"""The probe finds every planted fault: the module and the first token, at seeded places, whichever side has it."""

import pytest
from planting import PLANTS, FAMILIES

import mmpack as mp
from mmpack.adapters.transformers import probe_side

pytestmark = pytest.mark.adapter

FEW = [(name, p.families[i % len(p.families)], i) for i, (name, p) in enumerate(PLANTS.items())]
MANY = [
    (name, family, 100 + 7 * i + FAMILIES.index(family) + 50 * k)
    for i, (name, p) in enumerate(PLANTS.items())
    for family in p.families
    for k in range(3)
]


def look(name, family, seed):
    """What the probe found, and what it must find."""
    plant = PLANTS[name]
    scene = plant.scene(family, seed)
    healthy, planted, answer = plant.pair(scene)
    layout = plant.layouts[seed % len(plant.layouts)]
    sides = [probe_side(m, n, layout=layout) for m, n in ((healthy, "healthy"), (planted, "planted"))]
    report = mp.probe.run(*sides[:: -1 if seed % 2 else 1], scene.samples)
    return scene, report, answer


def assert_found(scene, report, answer):
    first = report.first
    assert first is not None, f"missed: {answer}; {report.summary()}"
    assert first.module in answer.modules, (first, answer)
    place = (first.sample, first.token)
    assert place == (scene.samples[answer.sample].sample_id, answer.token), (first, answer)
    assert first.modality.split()[0] == answer.modality, (first, answer)


@pytest.mark.parametrize(("name", "family", "seed"), FEW)
def test_a_fault_is_found(name, family, seed):
    assert_found(*look(name, family, seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family", "seed"), MANY)
def test_faults_are_found_at_other_places(name, family, seed):
    assert_found(*look(name, family, seed))
