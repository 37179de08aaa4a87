"""Keys of prefixes: equal exactly where ids, media, positions, rule, weights and adapter are; no collisions."""

import copy
import hashlib
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.process import run_python
from support.samples import make_medium, make_sample, samples

import mmpack as mp
from mmpack.cache import prefix_keys
from mmpack.cache.keys import chained
from mmpack.errors import ArgumentError
from mmpack.layout.fingerprint import cache_key


def one(name="x", ids=range(40, 60), **fields):
    parts = [("text", range(9)), ("image", (1, 4, 6), name), ("text", ids), ("response", [7, 8])]
    return make_sample(parts, **fields)


def blocks(sample, size=4, **about):
    return prefix_keys(sample, size, **({"weights": "w1"} | about)).blocks


def shared(a, b):
    """How many leading blocks agree; none agrees after one that does not."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def test_equal_ids_with_another_picture():
    a, b = one("x"), one("y")
    assert np.array_equal(a.input_ids, b.input_ids) and a.media[0].grid_thw == b.media[0].grid_thw
    start = a.modality_spans[0].start
    assert shared(blocks(a), blocks(b)) == start // 4 > 0


def test_pictures_exchanged():
    def two(*names):
        return make_sample(
            [("text", [1, 2]), *[("image", (1, 4, 4), n) for n in names], ("text", range(8))]
        )

    a, b, c = two("x", "y"), two("y", "x"), two("x", "x")
    assert np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.input_ids, c.input_ids)
    second = a.modality_spans[1].start
    assert shared(blocks(a, 1), blocks(b, 1)) == a.modality_spans[0].start
    assert shared(blocks(a, 1), blocks(c, 1)) == second


@pytest.mark.parametrize(
    "about",
    [
        {"weights": "w2"},
        {"adapter": "lora-1"},
        {"position_rule": "max"},
        {"weights": "w1lora-1"},
    ],
    ids=str,
)
def test_another_version_shares_nothing(about):
    assert shared(blocks(one()), blocks(one(), **about)) == 0


def test_families_and_block_sizes_share_nothing():
    assert shared(blocks(one()), blocks(one(family="qwen2_vl"))) == 0
    a, b = blocks(one(), 4), blocks(one(), 5)
    assert not set(a) & set(b)


def test_other_positions_are_another_prefix():
    a, b = one(), one()
    positions = mp.mrope_positions(a.input_ids, family=a.family, image_grid_thw=[(1, 4, 6)])[0]
    assert blocks(a) == blocks(a, positions=positions)
    b.position_ids = positions.copy()
    b.position_ids[2, 17] += 1
    assert shared(blocks(a), blocks(b)) == 17 // 4


def test_the_rule_that_was_recorded_counts():
    a, b = one(), one()
    b.processor = {"position_rule": "max"}
    assert shared(blocks(a), blocks(b)) == 0
    assert blocks(a, position_rule="max") == blocks(b)


def test_videos_of_equal_frames_at_other_times():
    def film(seconds):
        sample = make_sample([("text", range(4)), ("video", (2, 4, 4), "f"), ("text", range(9))])
        sample.media[0].second_per_grid_ts = seconds
        sample.position_ids = np.tile(np.arange(len(sample)), (3, 1))
        return sample

    a, b = blocks(film(1.0)), blocks(film(2.0))
    assert shared(a, b) == 1 and a == blocks(film(1.0))


def test_settings_alone_change_the_media_name():
    a, b = one(), one()
    medium = make_medium("x", (1, 4, 6))
    medium.cache_key = cache_key(medium.content_hash, medium.grid_thw, {"max_pixels": 1})
    b.media[0] = medium
    assert shared(blocks(a), blocks(b)) == a.modality_spans[0].start // 4


@settings(max_examples=25, deadline=None)
@given(samples(), st.integers(1, 7), st.data())
def test_what_changes_changes_all_after_it(sample, size, data):
    keys = blocks(sample, size)
    assert keys == blocks(copy.deepcopy(sample), size)
    where = data.draw(st.integers(0, len(sample) - 1))
    other = copy.deepcopy(sample)
    positions = sample.position_ids
    if positions is None:
        from mmpack.layout.forest import positions_of

        positions = positions_of(sample)
    other.input_ids[where] ^= 1
    assert shared(keys, blocks(other, size, positions=positions)) == where // size


def test_keys_are_those_of_every_process():
    code = """
import mmpack as mp, sys
from mmpack.cache import prefix_keys
text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
sample = mp.Sample.from_dict(text | {"sample_id": "a", "input_ids": [*range(9)], "loss_spans": []})
print([k.hex() for k in prefix_keys(sample, 3, weights="w").blocks])
assert not {"torch", "transformers"} & set(sys.modules)
"""
    runs = {run_python(code, env=os.environ | {"PYTHONHASHSEED": str(i)}).stdout for i in range(2)}
    assert len(runs) == 1 and len(eval(runs.pop())) == 3


def test_a_key_is_the_hash_of_what_the_module_says():
    ids = np.arange(4)[:, None]
    first, place = b"f" * 32, (1, 9, b"m" * 32)
    at = np.array([1, 9, -1, 7], dtype="<i8").reshape(2, 2)
    expected = [first]
    for k in range(2):
        data = ids[2 * k : 2 * k + 2].astype("<i8").tobytes() + at[k].tobytes() + place[2]
        expected.append(hashlib.blake2b(expected[-1] + data, digest_size=32).digest())
    assert list(chained(first, ids, 2, [place])) == expected[1:]


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"weights": ""}, "weights is empty"),
        ({"adapter": 3}, "adapter is of type int"),
        ({"block_size": 0}, "block_size is 0"),
        ({"positions": np.zeros((3, 2), dtype=np.int64)}, "positions have shape"),
        (
            {"positions": np.full((3, len(one())), np.nan)},
            "positions is a numpy array, dtype float64",
        ),
        ({"positions": np.full((3, len(one())), 2**63, np.uint64)}, "positions are beyond int64"),
        ({"position_rule": 5}, "position_rule is of type int"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(about, said):
    with pytest.raises(ArgumentError, match=rf"prefix_keys: {said}.* Fix: "):
        prefix_keys(one(), **({"weights": "w"} | about))
    with pytest.raises(ArgumentError, match="sample is of type list"):
        prefix_keys([one()], weights="w")


def test_masked_tokens_have_no_keys():
    """Their KV is seen by no later token, so equal ids would be a wrong hit."""
    sample = one()
    sample.attention_mask = np.ones(len(sample), np.int64)
    assert blocks(sample) == blocks(one())
    sample.attention_mask[3] = 0
    with pytest.raises(ArgumentError, match=r"masked tokens.* Fix: "):
        blocks(sample)
