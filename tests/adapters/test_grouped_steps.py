"""Steps cut from a stream, and batches packed in workers: the same ones wherever a loop was cut."""

import functools
import json

import numpy as np
import pytest
import torch
from support.same import assert_equal
from support.samples import make_sample
from torch.utils.data import DataLoader

import mmpack as mp
from mmpack.adapters.torch import GroupedSteps, PackBatches, PackLoader


@functools.cache
def answers(groups=7, size=3):
    """Samples of `groups` prompts, of unlike lengths."""
    rng = np.random.default_rng(0)
    made = []
    for g in range(groups):
        prompt = rng.integers(0, 1000, 5 + g).tolist()
        for k in range(size):
            response = rng.integers(0, 1000, 3 + (g * k) % 7).tolist()
            parts = [("text", prompt), ("response", response)]
            made.append(make_sample(parts, sample_id=f"g{g}-{k}", group_id=f"g{g}"))
    return made


class Stream:
    """A stream that knows its place and counts what is read of it."""

    def __init__(self, samples):
        self.samples, self.at, self.read = samples, 0, 0

    def __iter__(self):
        start, self.at = self.at, 0
        for i in range(start, len(self.samples)):
            self.at, self.read = i + 1, self.read + 1
            yield self.samples[i]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loader_of(stream):
    return PackLoader(steps=GroupedSteps(stream, 2), max_tokens=30, share_prefix=True)


def batches_of(loader):
    return [(s.number, b.sample_ids, b.input_ids, b.visible_until) for s in loader for b in s]


def test_steps_are_whole_groups_in_order():
    steps = list(GroupedSteps(iter(answers()), 2))
    assert [[s.sample_id for s in step] for step in steps] == [
        [f"g{g}-{k}" for g in range(a, min(a + 2, 7)) for k in range(3)] for a in (0, 2, 4, 6)
    ]
    assert list(GroupedSteps([], 1)) == []
    for given, said in ((([], 0), "groups_per_step is 0"), ((3, 1), "samples is of type int")):
        with pytest.raises(mp.ArgumentError, match=f"GroupedSteps: {said}"):
            GroupedSteps(*given)


@pytest.mark.parametrize("knows", [True, False])
def test_a_loop_over_a_stream_goes_on_where_it_was_cut(knows):
    def stream():
        return Stream(answers()) if knows else answers()

    whole = batches_of(loader_of(stream()))
    assert len(whole) > 6
    for cut in range(len(whole)):
        loader = loader_of(stream())
        loop = (batch for step in loader for batch in step)
        for _ in range(cut):
            next(loop)
        state = json.loads(json.dumps(loader.state_dict()))
        loop.close()
        source = stream()
        again = loader_of(source)
        again.load_state_dict(state)
        assert_equal(batches_of(again), whole[cut:])
        if knows:  # nothing twice but the step that was cut
            left = sum(len(step) for step in list(GroupedSteps(answers(), 2))[state["step"] :])
            assert source.read == left
        assert_equal(batches_of(again), whole)  # the next epoch is whole


def fields_of(item):
    batch, *rest = item
    return [batch.sample_ids, batch.input_ids, batch.position_ids, batch.loss_columns, *rest]


def packed_in_workers(**options):
    samples = answers()
    loader = PackLoader(
        samples,
        max_tokens=40,
        share_prefix=True,
        groups_per_step=2,
        shuffle=True,
        seed=1,
        loss_columns={"advantages": torch.arange(float(len(samples)))},
        **options,
    )
    return PackBatches(loader)


def test_workers_give_the_batches_of_the_loader_in_its_order():
    expected = [
        [b.sample_ids, b.input_ids, b.position_ids, b.loss_columns]
        for step in packed_in_workers().loader
        for b in step
    ]
    for workers in (0, 2):
        loader = DataLoader(packed_in_workers(), batch_size=None, num_workers=workers)
        got = [fields_of(x) for x in loader]
        assert_equal([x[:4] for x in got], expected)
        steps, last = [x[5] for x in got], [x[7] for x in got]
        assert steps == sorted(steps)
        assert last == [a != b for a, b in zip(steps, [*steps[1:], -1], strict=True)]
    dataset = packed_in_workers()
    dataset.set_epoch(1)
    other = [x.batch.sample_ids for x in dataset]
    assert other != [x[0] for x in expected]
    assert sorted(name for names in other for name in names) == sorted(
        s.sample_id for s in answers()
    )


def test_a_data_set_of_batches_goes_on_where_it_was_cut():
    whole = [fields_of(x) for x in packed_in_workers()]
    for cut in range(len(whole)):
        dataset = packed_in_workers()
        loop = iter(dataset)
        for _ in range(cut):
            next(loop)
        state = json.loads(json.dumps(dataset.state_dict()))
        again = packed_in_workers()
        again.load_state_dict(state)
        assert_equal([fields_of(x) for x in again], whole[cut:])
    assert_equal([fields_of(x) for x in again], whole)  # the next epoch is whole


def test_what_a_data_set_of_batches_refuses():
    with pytest.raises(mp.ArgumentError, match="PackBatches: loader is of type list"):
        PackBatches([])
    with pytest.raises(mp.ArgumentError, match="the loader's device is meta"):
        packed_in_workers(device="meta")
    dataset = packed_in_workers()
    with pytest.raises(mp.ArgumentError, match="not a state of PackBatches"):
        dataset.load_state_dict(dataset.loader.state_dict())
    next(iter(dataset))
    with pytest.raises(mp.ArgumentError, match="ranks=1"):
        packed_in_workers(ranks=2).load_state_dict(dataset.state_dict())
