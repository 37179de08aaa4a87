"""The probe finds every planted fault: the module and the first token, at seeded places, whichever side has it."""

import pytest
import torch
from planting import FAMILIES, PLANTS

import mmpack as mp
from mmpack.adapters.transformers.probe import probe_side

FEW = [(name, p.families[i % len(p.families)], i) for i, (name, p) in enumerate(PLANTS.items())]
MANY = [  # of each plant every third family: others for the next
    (name, family, 100 + 7 * i + FAMILIES.index(family))
    for i, (name, p) in enumerate(PLANTS.items())
    for family in p.families[(i + 1) % 3 :: 3]
]
# what changes rows by far more than a rounding to bfloat16
LARGE = (
    "a picture whose tokens see each other both ways",
    "state that leaks between packed samples",
    "query heads that read the wrong key head",
    "a residual left out",
    "mRoPE's height and width dropped",
    "sections of height and width exchanged",
    "two deepstack levels exchanged",
    "one picture's features in another's place",
    "a picture's last row not merged",
    "the merger's rows permuted",
    "GELU instead of SiLU",
    "norms of query and key exchanged",
    "dropout left on in a layer",
    "logprobs over all ids",
)


def look(name, family, seed, dtype=None, mixed=False):
    """The scene, what the probe found, and what it must find. `mixed`: the healthy side has another layout."""
    plant = PLANTS[name]
    scene = plant.scene(family, seed)
    healthy, planted, answer = plant.pair(scene)
    layout = plant.layouts[seed % len(plant.layouts)]
    other = ("alone", "padded", "packed", "padded_right")[seed % 4] if mixed else layout
    sides = [
        probe_side(healthy, "healthy", layout=other, dtype=dtype),
        probe_side(planted, "planted", layout=layout, dtype=dtype, **plant.side),
    ]
    report = mp.probe.run(*sides[:: -1 if seed % 2 else 1], scene.samples)
    return scene, report, answer


def assert_found(scene, report, answer):
    first = report.first
    assert first is not None, f"missed: {answer}; {report.summary()}"
    assert first.module in answer.modules, (first, answer)
    place = (first.sample, first.token)
    assert place == (scene.samples[answer.sample].sample_id, answer.token), (first, answer)
    assert first.modality.split()[0] == answer.modality, (first, answer)
    assert answer.suggests in report.suggests, (report.suggests, answer)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "family", "seed"),
    [
        pytest.param(*few, marks=pytest.mark.slow if i % 3 else pytest.mark.adapter)
        for i, few in enumerate(FEW)
    ],
)
def test_a_fault_is_found(name, family, seed):
    assert_found(*look(name, family, seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family", "seed"), MANY)
def test_faults_are_found_at_other_places(name, family, seed):
    assert_found(*look(name, family, seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family", "seed"), FEW)
def test_a_fault_is_found_among_the_differences_of_two_layouts(name, family, seed):
    assert_found(*look(name, family, seed, mixed=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_large_fault_is_found_in_bfloat16(name):
    plant = PLANTS[name]
    for seed, family in enumerate(plant.families):
        assert_found(*look(name, family, 3 * seed, torch.bfloat16))
