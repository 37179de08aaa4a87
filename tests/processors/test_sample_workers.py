"""Samples made in worker processes, some of which are killed: every item comes once, in order, or as a letter."""

import os
import signal
from collections import Counter

import numpy as np
import pytest
from support.faulty_items import COUNT, Faulty, NoPickle, sample_of

import mmpack as mp
from mmpack.blobs import SharedBlobs
from mmpack.errors import ArgumentError, BackendError


def test_what_is_wrong_with_one_item_is_wrong_with_it_alone(tmp_path):
    faults = {3: "dies", 4: "raises", 9: "dies once", 10: "gone"}
    faults |= {13: "dies sending", 20: "can't be sent"}
    made = list(mp.SampleWorkers(Faulty(faults, tmp_path), workers=2))
    letters = {i: x for i, x in enumerate(made) if isinstance(x, mp.schema.DeadLetter)}
    codes = {3: "MM504", 4: "MM505", 10: "MM501", 13: "MM504", 20: "MM505"}
    assert {i: x.code for i, x in letters.items()} == codes
    assert all(x.place == f"samples[{i}]" and "\n" not in x.reason for i, x in letters.items())
    assert letters[4].reason == "ValueError: no item\\n4"
    for i, item in enumerate(made):
        if i not in letters:
            assert item == (sample_of(i), {"advantages": float(i)})
    assert len(made) == COUNT
    tried = Counter({i: len((tmp_path / str(i)).read_text().split()) for i in range(COUNT)})
    assert tried[0] == 1 and tried[3] == tried[13] == 3 and max(tried.values()) == 3


def test_workers_that_others_kill_cost_no_item():
    """As the system does where memory runs out: any worker, while others make items."""
    workers = mp.SampleWorkers(Faulty({}), workers=2, order=range(8, COUNT))
    made, killed = [], []
    for item in workers:
        made.append(item)
        if len(made) in (1, 4, 9):
            killed.append(workers.pids[0])
            os.kill(killed[-1], signal.SIGKILL)
    assert len(set(killed)) >= 2 and len(workers) == 16
    assert [sample.sample_id for sample, _ in made] == [f"s{i}" for i in range(8, COUNT)]


def test_pixels_stay_in_the_store(tmp_path):
    room = 10 * 16 * 1176 * 4
    with SharedBlobs(room, root=tmp_path) as store:
        kept = []
        for sample, _ in mp.SampleWorkers(Faulty({}), workers=1, ahead=3, media=store):
            assert all(m.pixel_values is None for m in sample.media)
            kept.append(sample)
            store.remove(list(store))  # what was given is held
            assert set(sample.media_cache_keys) <= set(store)
        pixels = mp.pack(kept, media=store).pixel_values
        assert np.array_equal(pixels, mp.pack([sample_of(i) for i in range(COUNT)]).pixel_values)
        store.release(k for sample in kept for k in sample.media_cache_keys)
        assert store.remove(list(store)) == COUNT // 4


def test_refused_data():
    with pytest.raises(ArgumentError, match="data is generator"):
        mp.SampleWorkers(x for x in [1])
    with pytest.raises(ArgumentError, match="workers is 0"):
        mp.SampleWorkers([1], workers=0)
    with pytest.raises(ArgumentError, match="media is dict"):
        mp.SampleWorkers([1], media={})
    with pytest.raises(BackendError, match="end before their first task"):
        list(mp.SampleWorkers(NoPickle(), workers=1))
