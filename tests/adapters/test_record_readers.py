"""Random trees of turns, written as each framework records them: what a reader makes of them is the same tree."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.record_readers import READERS
from support.recorded_trees import parents, said, trees
from support.trajectories import scored_of_samples, scored_of_turns

import mmpack as mp
from mmpack.trajectory import branches
from mmpack.trajectory import to_samples as samples_of


def named(turn):
    return tuple(turn.input_ids), tuple(m.cache_key for m in turn.media), turn.logprobs.tobytes()


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=12)
@given(data=st.data())
def test_a_tree_comes_back_as_it_was(name, data):
    reader = READERS[name]
    turns = data.draw(trees(pictures=reader.pictures))
    for turn, parent in zip(turns, parents(turns), strict=True):
        # a mask can't say that two answers meet
        assume(parent is None or len(turns[parent]) < len(turn.context_ids))
    (episode,) = reader.read(reader.write(turns), {m.cache_key: m for t in turns for m in t.media})
    assert sorted(said(episode.turns)) == sorted(said(turns))
    if said(episode.turns) == said(turns):  # else chain by chain
        assert [b.parent for b in branches(episode)] == parents(turns)
    roots = [[p is None for p in parents(t)] for t in (episode.turns, turns)]
    assert sorted(roots[0]) == sorted(roots[1])
    samples = samples_of(episode)
    assert scored_of_samples(samples) == scored_of_turns(turns) and mp.validate(samples) == []
    whole = {named(turn): turn for turn in turns}
    for turn in episode.turns:
        told = whole[named(turn)]
        assert [getattr(turn, f) for f in reader.same] == [getattr(told, f) for f in reader.same]
        if turn.routed_experts is not None:
            assert np.array_equal(turn.routed_experts[:-1], told.routed_experts[:-1])
