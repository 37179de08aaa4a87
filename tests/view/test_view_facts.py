"""What is drawn is right: roles against the pack, scores against scatter_rewards, prefixes against a plain loop."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from support.gui import samples as gui_samples
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.view.trace.episodes import episodes_of
from mmpack.view.trace.places import Mark, drawn_action, marks_of
from mmpack.view.trace.roles import repeats, roles_of, rows_of, texts_of
from mmpack.view.trace.scores import placed_scores
from mmpack.view.trace.tokens import DIGITS, packed_ids, packed_lengths


def every_sample():
    return [*gui_samples(), full_sample("full"), three_turns()]


def three_turns():
    """A score of each turn and of the sequence."""
    parts = [part for k in range(3) for part in (("text", [k]), ("response", [5, 6 + k], k))]
    sample = make_sample(parts, "three turns")
    sample.rewards = [mp.Score(name=f"r{k}", value=1.0, scope={"turn": k}) for k in range(3)]
    sample.rewards.append(mp.Score(name="done", value=1.0))
    return sample


@pytest.mark.parametrize("sample", every_sample(), ids=lambda s: s.sample_id)
def test_the_loss_is_that_of_the_pack(sample):
    roles = roles_of(sample)
    batch = mp.pack([sample])
    assert np.flatnonzero(roles.loss).tolist() == batch.loss_token_index.tolist()
    turns = roles.turn[roles.loss]
    named = batch.loss_turn.numpy() >= 0
    assert (turns[named] == batch.loss_turn.numpy()[named]).all()
    pictures = np.isin(sample.input_ids, [151655, 151656])
    assert ((roles.medium >= 0) == pictures).all()


def test_roles_by_hand():
    sample = make_sample(
        [
            ("text", [1, 2]),
            ("image", (1, 4, 4)),
            ("response", [3, 4], 0, "reasoning"),
            ("response", [5, 6], 0, "action"),
            ("observation", [7], 1),
            ("response", [8], 1),
        ]
    )
    sample.action_spans = [
        mp.schema.ActionSpan(len(sample) - 2, len(sample) - 1, {"action": "wait"}, 0)
    ]
    roles = roles_of(sample)
    letters = "".join("PIVORTA"[r] for r in roles.role)
    assert letters == "PP" + "P" + "IIII" + "P" + "TT" + "AA" + "A" + "R"
    rows = rows_of(roles, 0, [])
    bounds = [(row.start, row.stop) for row in rows]
    assert bounds[:2] == [(0, 3), (3, 7)] and bounds[-1][1] == len(sample)
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert not roles.loss[10:13].all()  # the action span itself is not in the loss


@pytest.mark.parametrize("sample", every_sample(), ids=lambda s: s.sample_id)
def test_scores_lie_where_scatter_rewards_puts_them(sample):
    roles = roles_of(sample)
    for score, placed in zip(sample.rewards or [], placed_scores(sample, roles), strict=False):
        assert placed.name == score.name and placed.kind == "reward"
        alone = make_alone(sample, score)
        reached = mp.scatter_rewards(alone, at="all").numpy() != 0
        tokens = alone.loss_token_index.numpy()[reached]
        drawn = np.arange(placed.start, placed.stop)
        assert set(tokens.tolist()) == set(drawn[roles.loss[drawn]].tolist())


def make_alone(sample, score):
    """The sample's pack with this score, of value 1."""
    other = mp.Sample.from_dict(sample.to_dict())
    other.rewards = [mp.Score(name=score.name, value=1.0, scope=score.scope)]
    return mp.pack([other])


@pytest.mark.parametrize(
    ("scope", "note"),
    [
        ("sequence", "no loss token"),
        ({"turn": 9}, "no loss token of this turn"),
        ({"region": 3}, "no such region"),
        ({"span": [50, 60]}, "no token there"),
        ({"span": [0, 2]}, "outside the loss"),
    ],
)
def test_a_scope_that_reaches_nothing_says_so(scope, note):
    sample = make_sample([("text", [1, 2, 3])])
    sample.costs = [mp.Score(name="c", value=float("nan"), scope=scope)]
    (placed,) = placed_scores(sample, roles_of(sample))
    assert placed.note == note and placed.number == "nan"


# ---- episodes ------------------------------------------------------------------------------------


def plain_prefix(one, two):
    """Leading tokens with equal ids and media, one after the other."""
    keys = []
    for sample in (one, two):
        at = ["text"] * len(sample)
        for span in sample.modality_spans:
            at[span.start : span.stop] = [sample.media[span.media_index].cache_key] * (
                span.stop - span.start
            )
        keys.append(at)
    count = 0
    while count < min(len(one), len(two)):
        if one.input_ids[count] != two.input_ids[count] or keys[0][count] != keys[1][count]:
            break
        count += 1
    return count


def test_the_episodes_of_the_fixture():
    samples = gui_samples()
    episodes = episodes_of(samples)
    assert [(e.kind, e.name, len(e.nodes)) for e in episodes] == [
        ("trajectory", "shop", 3),
        ("trajectory", "phone", 1),
        ("group", "text", 1),
        ("group", "clip", 1),
    ]
    first, second, retry = episodes[0].nodes
    assert second.parent is first and second.shared == len(first.sample)
    assert second.relation == "goes on from" and second.unread == first.sample.num_loss_tokens
    assert retry.parent is second and retry.relation == "branches off from"
    assert retry.shared == plain_prefix(retry.sample, second.sample)


def test_turns_are_put_in_order_and_another_picture_ends_a_prefix():
    parts = [("text", list(range(40))), ("image", (1, 4, 4), "a"), ("text", [5, 6])]
    one = make_sample(parts, "one", turn=1, trajectory_id="t")
    parts[1] = ("image", (1, 4, 4), "b")
    two = make_sample(parts, "two", turn=0, trajectory_id="t")
    (episode,) = episodes_of([one, two])
    assert [n.sample.sample_id for n in episode.nodes] == ["two", "one"]
    assert episode.nodes[1].shared == plain_prefix(one, two) == 41


def test_a_loss_token_is_never_folded_away():
    without = [("text", [*range(40), 7, 8, 9]), ("text", [3])]
    parts = [("text", list(range(40))), ("response", [7, 8, 9], 0), ("text", [3])]
    one, two = make_sample(without, "one"), make_sample(parts, "two")
    # the loss of `two` begins at 40
    for samples, shared, unread in (((one, two), 40, 0), ((two, one), 44, 3)):
        (episode,) = episodes_of(list(samples))
        assert (episode.nodes[1].shared, episode.nodes[1].unread) == (shared, unread)


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "point", "expected"),
    [
        ("absolute_pixels", (28.0, 42.0), (Fraction(28, 112), Fraction(42, 84))),
        ("normalized_1", (0.25, 0.5), (Fraction(1, 4), Fraction(1, 2))),
        ("normalized_1000", (250.0, 500.0), (Fraction(1, 4), Fraction(1, 2))),
    ],
)
def test_points_are_fractions_of_the_picture(system, point, expected):
    sample = make_sample([("text", [1]), ("image", (1, 6, 8)), ("response", [2, 3, 4])])
    sample.coordinate_system = system
    start = len(sample) - 2
    sample.region_spans = [mp.schema.RegionSpan(start, start + 1, 0, point=point)]
    sample.point_targets = [mp.schema.PointTarget(point=point)]
    action = {"action": "click", "x": point[0], "y": point[1]}
    sample.action_spans = [mp.schema.ActionSpan(start, start + 1, action)]
    marks = marks_of(sample)
    assert [(m.role, m.shape, m.media_index) for m in marks] == [
        ("region", "point", 0), ("target", "point", 0), ("action", "click", 0)
    ]  # fmt: skip
    for mark in marks:
        assert mark.points[0] == pytest.approx([float(v) for v in expected])
        assert not mark.outside


def test_what_places_are_read_in():
    """Pixels of a screen that is larger than what the model saw; without a system, what the family writes."""
    sample = make_sample([("text", [1]), ("image", (1, 6, 8)), ("response", [2])])
    sample.coordinate_system, sample.screen_size = "absolute_pixels", (1920, 1080)
    for point in ((960.0, 270.0), (56.0, 21.0)):  # the second fits what the model saw
        sample.point_targets = [mp.schema.PointTarget(point=point)]
        (mark,) = marks_of(sample)
        assert mark.points[0] == pytest.approx((0.5, 0.25))
    click = {"action": "click", "coordinate": [500, 250]}
    for family, at in (("qwen3_vl", (0.5, 0.25)), ("qwen2_5_vl", (500 / 448, 250 / 448))):
        parts = [("text", [1]), ("image", (1, 32, 32)), ("response", [2])]
        sample = make_sample(parts, family=family)
        sample.action_spans = [mp.schema.ActionSpan(len(sample) - 1, len(sample), click)]
        assert marks_of(sample)[0].points[0] == pytest.approx(at)


def test_a_place_without_numbers_or_medium_is_not_drawn():
    sample = make_sample([("text", [1]), ("image", (1, 6, 8)), ("response", [2])])
    sample.coordinate_system = "normalized_1"
    sample.region_spans = [
        mp.schema.RegionSpan(1, 2, 7, point=(0.1, 0.2)),
        mp.schema.RegionSpan(1, 2, 0, point=(float("nan"), 0.2)),
        mp.schema.RegionSpan(1, 2, 0),
    ]
    assert marks_of(sample) == []
    sample.region_spans = [mp.schema.RegionSpan(1, 2, 0, bbox=(0.9, 0.9, 1.4, 0.1))]
    (mark,) = marks_of(sample)
    assert mark.outside and mark.points == ((0.9, 0.1), (1.4, 0.9))
    text_only = make_sample([("text", [1]), ("response", [2])])
    text_only.action_spans = [mp.schema.ActionSpan(1, 2, {"action": "click", "coordinate": [1, 2]})]
    assert marks_of(text_only) == []


QWEN = {
    "name": "mobile_use",
    "arguments": {"action": "swipe", "coordinate": [3, 4], "coordinate2": [5, 6]},
}
SCROLL = {"action": "scroll", "coordinate": [0.5, 0.5], "pixels": 120}
TOOL = {"name": "computer_use", "arguments": SCROLL}
OPENAI = {"type": "function", "function": {"name": "tap", "arguments": '{"x": 3, "y": 4}'}}


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (QWEN, "swipe (3, 4) → (5, 6)"),
        ({"kind": "click", "point": [3, 4], "button": "right"}, "click (3, 4) right"),
        ({"kind": "key", "keys": ["ctrl", "c"]}, 'key ["ctrl", "c"]'),
        ({"kind": "tool_call", "name": "tap", "arguments": {"x": 3, "y": 4}}, "tap (3, 4)"),
        ({"type": "function", "function": TOOL}, "scroll (0.5, 0.5)"),
        ({"name": "computer_use", "arguments": {"action": "fly"}}, "fly"),
        ({"type": "drag", "start": {"x": 3, "y": 4}, "end": [5, 6]}, "drag (3, 4) → (5, 6)"),
        ({"type": "click", "start_box": [0, 0, 6, 8], "point": [0, 0, 6, 8]}, "click (3, 4)"),
        ({"action": "type", "text": "hi\n"}, "type hi\n"),
        ({"action": "drag", "path": [[3, 4], [5, 6], [7, 8]]}, "drag (3, 4) → (5, 6) → (7, 8)"),
        (OPENAI, "tap (3, 4)"),
        ({"action": "click", "coordinate": ["3", None]}, "click"),
        ({"action": "click", "coordinate": [float("nan"), 1]}, "click"),
        ({}, "action"),
    ],
)
def test_actions_of_any_format(action, words):
    assert drawn_action(action).words == words


@pytest.mark.parametrize(
    ("action", "to"),
    [
        ({"action": "scroll", "coordinate": [0.5, 0.5], "direction": "down"}, (0, 1)),
        (TOOL, (0, -1)),
        ({"kind": "scroll", "point": [0.5, 0.5], "dx": -5, "dy": 1}, (-1, 0)),
    ],
)
def test_a_scroll_has_an_arrow(action, to):
    sample = make_sample([("text", [1]), ("image", (1, 6, 8)), ("response", [2])])
    sample.coordinate_system = "normalized_1"
    sample.action_spans = [mp.schema.ActionSpan(len(sample) - 1, len(sample), action)]
    (mark,) = marks_of(sample)
    (x0, y0), (x1, y1) = mark.points
    assert mark.shape == "path" and (np.sign([x1 - x0, y1 - y0]) == to).all()


# ---- tokens --------------------------------------------------------------------------------------


def test_runs_of_equal_tokens():
    ids = np.array([1, 2, 2, 2, 2, 3, 3, 4])
    assert repeats(ids, 0, 8, 3) == [(0, 1, False), (1, 5, True), (5, 8, False)]
    assert repeats(ids, 2, 5, 3) == [(2, 5, True)]
    assert repeats(ids, 4, 4, 3) == []


def test_packed_numbers_can_be_read_again():
    for ids in ([0, 63, 64, 151_643, 5], [63], [64], [64**2, 1]):
        packed = packed_ids(ids)
        width = int(packed[0])
        digits = [packed[k : k + width] for k in range(1, len(packed), width)]
        read = [sum(DIGITS.index(c) * 64**k for k, c in enumerate(d[::-1])) for d in digits]
        assert read == ids
    assert packed_ids([-1, 2]) == ""
    lengths, left = [], 0
    for c in packed_lengths(["", "ab", "x" * 63, "y" * 200, "😀"]):
        left += DIGITS.index(c)
        if c != DIGITS[63]:
            lengths.append(left)
            left = 0
    assert lengths == [0, 2, 63, 200, 2]


def test_texts_of_a_sample():
    sample = make_sample([("text", [1, 2, 3])])
    pieces = {1: b"a\xe6", 2: b"\xb7", 3: b"\xb1 c"}
    assert texts_of(sample, pieces.__getitem__) == ["a深", "", " c"]
    assert texts_of(sample, None) is None
    sample.metadata["token_texts"] = ["x", "y", "z"]
    assert texts_of(sample, None) == ["x", "y", "z"]
    sample.metadata["token_texts"] = ["x"]
    assert texts_of(sample, None) is None


def test_letters_of_a_click_and_of_the_region_of_its_point_do_not_meet():
    """`annotate_actions` makes both: side by side "1" and "r0" read "10"."""
    for x in (0.02, 0.5, 0.99):
        click = Mark(0, "click", ((x, 0.5),), "1", "click", "action")
        region = Mark(0, "point", ((x, 0.5),), "r0", "region", "region")
        _, high = click.placed(200, 200).label
        _, low = region.placed(200, 200).label
        assert low - high >= 13 and high < 100 < low  # a letter is 13 high, and the click between
