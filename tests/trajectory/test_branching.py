"""`branches`: which turn each goes on from, and where and by how much others part, beside plain comparisons."""

import dataclasses

from hypothesis import given, settings
from support.recorded_trees import parents, routes_of, trees
from support.trajectories import episode, joined, screen, shot

from mmpack.trajectory import Turn, branches, to_samples


def kinds(*turns):
    return [(b.kind, b.parent, b.other, b.position) for b in branches(episode(list(turns)))]


def test_each_kind():
    first = Turn([1, 2], [3, 4])
    assert kinds(first, Turn([9], [1])) == [("first", None, None, 0)] * 2
    assert kinds(first, Turn([1, 2, 3, 4, 5], [6])) == [
        ("first", None, None, 0),
        ("goes_on", 0, 0, 4),
    ]
    assert kinds(first, Turn([1, 2], [7]), Turn([1, 2, 7], [8]))[1:] == [
        ("sibling", None, 0, 2),
        ("goes_on", 1, 1, 3),
    ]
    # two observations behind one answer
    again = [Turn([1, 2, 3, 4, 5], [6]), Turn([1, 2, 3, 4, 7], [6])]
    assert kinds(first, *again)[1:] == [("goes_on", 0, 0, 4), ("fork", 0, 1, 4)]
    # the prompt itself is another one
    assert kinds(first, Turn([1, 8], [3]))[1:] == [("fork", None, 0, 1)]


def parting(history, context):
    (_, branch) = branches(episode([Turn(*history), Turn(context, [9])]))
    return branch


def test_an_answer_that_was_rendered_anew():
    """Token 2 of the answer onwards: two ids became one, and all behind them is the same."""
    branch = parting(([1, 2], [3, 4, 5, 6, 7]), [1, 2, 3, 4, 56, 7, 8, 8])
    assert (branch.kind, branch.position, branch.answer) == ("rewritten", 4, (0, 2))
    assert (branch.removed, branch.put) == (2, 1)
    assert str(branch) == (
        "turn 1 parts from turn 0 at token 4 (2 of its answer): 2 ids of the history, 1 in the context"
    )
    # thinking that was stripped
    branch = parting(([1, 2], [30, 31, 32, 5, 6]), [1, 2, 5, 6, 8])
    assert (branch.kind, branch.position, branch.removed, branch.put) == ("rewritten", 2, 3, 0)
    # two places: from the first to the last of them
    branch = parting(([1, 2], [10, 11, 12, 13, 14, 15, 16]), [1, 2, 10, 71, 12, 13, 74, 15, 16, 5])
    assert (branch.position, branch.removed, branch.put) == (3, 4, 4)
    # the rest never comes back
    branch = parting(([1, 2], [3, 4, 5]), [1, 2, 3, 8, 8])
    assert (branch.kind, branch.removed, branch.put) == ("rewritten", 2, None)
    assert str(branch).endswith("(1 of its answer): 2 ids of the history are not in the context")


def test_another_picture_is_another_context():
    """Equal ids: the two part where the first of its tokens stands."""
    context = screen([1, 2], shot("a0"))
    first = Turn(context[0], [5], context[1])
    grown = joined((context[0] + [5], context[1]), ([6], []))
    other = dataclasses.replace(first, media=[shot("a1")])
    assert kinds(first, Turn(grown[0], [7], grown[1]))[1][0] == "goes_on"
    assert kinds(first, Turn(grown[0], [7], [shot("a1")]))[1] == ("fork", None, 0, 3)
    assert kinds(first, other)[1] == ("fork", None, 0, 3)
    assert len(to_samples(episode([first, Turn(grown[0], [7], [shot("a1")])]))) == 2


def test_other_routes_are_another_branch():
    first = Turn([1, 2], [3, 4], routed_experts=routes_of([1, 2, 3, 4]))
    second = Turn([1, 2, 3, 4, 5], [6], routed_experts=routes_of([1, 2, 3, 4, 5, 6]))
    assert kinds(first, second)[1] == ("goes_on", 0, 0, 4)
    second.routed_experts[2, 0, 1] += 1
    assert kinds(first, second)[1] == ("routes", None, 0, 2)
    (_, branch) = branches(episode([first, second]))
    assert str(branch).endswith("by its ids, with other routes from token 2 on")
    second.routed_experts = None
    assert kinds(first, second)[1] == ("routes", None, 0, 0)


@settings(deadline=None, max_examples=60)
@given(trees())
def test_parents_are_those_of_plain_tuples(turns):
    found = branches(episode(turns))
    assert [b.parent for b in found] == parents(turns)
    for b, turn in zip(found, turns, strict=True):
        if b.other is None:
            continue
        other = turns[b.other]
        context, history = turn.context_ids.tolist(), other.input_ids.tolist()
        assert context[: b.position] == history[: b.position]
        if b.kind in ("fork", "rewritten") and b.put is not None:
            # what is left of the history follows what stands in place of the rest
            rest = history[b.position + b.removed :]
            start = b.position + b.put
            assert context[start : start + len(rest)] == rest
        if b.kind == "sibling":
            assert context == other.context_ids.tolist()
