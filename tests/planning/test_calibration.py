"""The cost fitted to measured steps: known rates are found again, and what can't be told is refused in one line."""

import json

import numpy as np
import pytest
from scipy.optimize import nnls
from support.groups import answered

import mmpack as mp
from mmpack.errors import ArgumentError, PlanError
from mmpack.families.kinds import REFERENCE
from mmpack.layout.forest import build_forest
from mmpack.planning import CostModel, Counts, calibrate, cost_model
from mmpack.planning.counts import counts_of_batch, counts_of_forest, summed, with_media

BASE = cost_model(REFERENCE)
FACTORS = {"decoder": 1.7, "attention": 0.8, "head": 2.5, "tower": 3.0, "batch": 0.02}


def drawn(count, seed=0):
    """Micro-batches of unlike lengths, pictures and answers."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        lengths = random.integers(200, 30_000, random.integers(1, 12))
        held = Counts(
            int(lengths.sum()),
            int((lengths * (lengths + 1) // 2).sum()),
            loss_tokens=int(lengths.sum() * random.uniform(0.02, 0.9)),
        )
        grids = [("image", (1, 2 * int(random.integers(10, 60)), 80))] * int(random.integers(0, 20))
        yield with_media(held, grids, BASE.spans)


def seconds(counts, factors):
    c = counts
    parts = {
        "decoder": BASE.row * c.rows,
        "attention": BASE.pair * c.pairs + BASE.key * c.keys,
        "head": BASE.loss_token * c.loss_tokens,
        "tower": BASE.patch * c.patches
        + BASE.frame_pair * c.frame_pairs
        + BASE.tile_pair * c.tile_pairs,
        "batch": c.batches,
    }
    return sum(factors[name] * value for name, value in parts.items())


def test_known_factors_are_found_again():
    steps = [(c, seconds(c, FACTORS)) for c in drawn(12)]
    found = calibrate(steps, BASE)
    assert found.factors == pytest.approx(FACTORS, rel=1e-6)
    assert found.error < 1e-6 and found.worst < 1e-6
    for counts in drawn(5, seed=1):
        assert found.cost.seconds(counts) == pytest.approx(seconds(counts, FACTORS))
    assert found.cost.calibrated and not BASE.calibrated
    two = list(drawn(2, seed=2))
    both = found.cost.seconds(summed(two))
    assert both == pytest.approx(sum(map(found.cost.seconds, two)))


def test_noise_shows_in_the_error_of_steps_left_out():
    random = np.random.default_rng(3)
    noisy = [(c, seconds(c, FACTORS) * random.uniform(0.9, 1.1)) for c in drawn(14)]
    found = calibrate(noisy, BASE)
    assert 0.01 < found.error < 0.12 and found.worst < 0.5
    assert found.cost.error == found.error
    shares = np.array(
        [
            [seconds(c, {n: float(n == name) for n in FACTORS}) / s for name in FACTORS]
            for c, s in noisy
        ]
    )
    assert list(found.factors.values()) == pytest.approx(nnls(shares, np.ones(14))[0])
    assert found.errors == pytest.approx(shares @ nnls(shares, np.ones(14))[0] - 1)
    others = nnls(np.delete(shares, 4, axis=0), np.ones(13))[0]
    assert found.left_out[4] == pytest.approx(shares[4] @ others - 1)
    assert np.mean(np.abs(found.left_out)) > np.mean(np.abs(found.errors))


def test_parts_left_out_keep_their_proportion():
    twice = dict.fromkeys(FACTORS, 2.0) | {"batch": 0.0, "tower": 5.0}
    found = calibrate([(c, seconds(c, twice)) for c in drawn(8)], BASE, parts=["decoder", "tower"])
    assert found.factors == pytest.approx({"decoder": 2.0, "tower": 5.0})
    assert found.cost.loss_token == pytest.approx(2 * BASE.loss_token)
    assert found.cost.pair == pytest.approx(2 * BASE.pair) and found.cost.batch == 0


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        ([(Counts(rows=10), 1.0)], {}, r"1 steps can't fit 2 parts \(decoder, batch\). Fix: measure 3"),
        ([(Counts(rows=10), 1.0)] * 9, {}, "can't tell decoder from batch"),
        ([(Counts(rows=r, loss_tokens=r), 1.0) for r in range(1, 9)], {}, "can't tell decoder from head"),
        ([(Counts(rows=10), 0.0)], {}, r"measured\[0\] is 0"),
        ([(17, 1.0)], {}, r"measured\[0\] holds of type int"),
        ([17], {}, r"measured\[0\] is of type int"),
        ([(Counts(rows=10), 1.0)], {"parts": ["rows"]}, "parts is .'rows'.*some of decoder"),
        ([(Counts(rows=10), 1.0)], {"parts": ["batch"]}, "not batch alone"),
        ([(Counts(rows=10), 1.0)], {"parts": ["tower"]}, "no step has any of tower"),
    ],
)  # fmt: skip
def test_steps_that_say_too_little_are_refused(steps, options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        calibrate(steps, BASE, **options)
    assert "Fix: " in str(caught.value) and "\n" not in str(caught.value)


def batches():
    samples = [answered(f"s{k}", "g", [5] * 60, [100 + k] * 9, (1, 4, 6)) for k in range(4)]
    samples += [answered("t", "h", [7] * 9, [8] * 5, (1, 8, 8))]
    return samples


@pytest.mark.parametrize("share", [False, True])
def test_counts_of_a_batch_are_those_of_its_samples(share):
    samples = batches()
    batch = mp.pack(samples, share_prefix=share, pad_to_multiple_of=64)
    found = counts_of_batch(batch, BASE.spans)
    held = counts_of_forest(build_forest(samples, share), BASE.spans)
    pictures = [("image", (1, 4, 6)), ("image", (1, 8, 8))]
    loss = sum(s.num_loss_tokens for s in samples)
    assert found == with_media(held, pictures, BASE.spans)._replace(loss_tokens=loss)
    padding = len(batch.input_ids) - batch.num_tokens  # a sequence of its own
    assert found.pairs == batch.attention_plan.pairs - padding * (padding + 1) // 2
    assert (found.patches, found.frame_pairs) == (24 + 64, 24**2 + 64**2)
    assert found.tile_pairs == 24**2 + 64**2  # both fit into a window of 8 × 8 patches
    plan = mp.plan(samples, max_tokens=1000, share_prefix=share, model=REFERENCE)
    assert plan.bin_costs == [pytest.approx(BASE.seconds(found))]


def test_batches_calibrate_and_lists_of_them():
    made = [mp.pack(batches()[:k], share_prefix=s) for k in (1, 2, 4, 5) for s in (False, True)]
    steps = [(b, 2 * BASE.seconds(counts_of_batch(b, BASE.spans))) for b in made]
    steps.append((made[:3], sum(s for _, s in steps[:3])))
    found = calibrate(steps, BASE, parts=["decoder"])
    assert found.factors == pytest.approx({"decoder": 2.0})


def test_a_cost_is_a_file(tmp_path):
    found = calibrate([(c, seconds(c, FACTORS)) for c in drawn(12)], BASE)
    found.save(tmp_path / "cost.json")
    same = CostModel.load(tmp_path / "cost.json")
    assert same == found.cost and same.spans == BASE.spans
    document = json.loads((tmp_path / "cost.json").read_text())
    for change, message in (
        ({"format": "other"}, "not a cost file of format"),
        ({"row": "fast"}, "is damaged"),
        ({"speed": 3}, "is damaged"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(document | change))
        with pytest.raises(PlanError, match=message):
            CostModel.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{")
    for name, message in (("bad.json", "is not JSON"), ("none.json", "can't be read")):
        with pytest.raises(PlanError, match=message):
            CostModel.load(tmp_path / name)
