"""Records of other frameworks with each field damaged in turn: read as they say, or refused in one line."""

import base64
import copy

import numpy as np
import pytest
from support.record_readers import READERS
from support.recorded_trees import npy, processor, turn_of
from support.trajectories import joined, screen, shot

from mmpack.errors import ArgumentError, MmpackError
from mmpack.trajectory import Record, from_records, to_samples

ODD = [None, "x", -1, 2.5, float("inf"), {}, ["x"], [[1]], 2**70, np.zeros((2, 2)), object()]


def turns():
    """Two turns with a picture each, and one of another context."""
    first = turn_of(screen([1, 2], shot("a0")), [3, 4], 0)
    seen = (first.input_ids.tolist(), first.media)
    return [first, turn_of(joined(seen, screen([5], shot("b0"))), [6, 8], 1), plain()]


def plain():
    return turn_of(([9, 8], []), [1, 3], 2)


MEDIA = {m.cache_key: m for turn in turns() for m in turn.media}
# their pictures are read anyhow
FLAT = ("prime_rl samples", "skyrl", "verl")


def read(name, record):
    return READERS[name].read(record, MEDIA)


def paths(value, at=()):
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else ()
    items = list(enumerate(value))[:2] if isinstance(value, list) else items
    for key, inner in items:
        yield from paths(inner, (*at, key))


def damaged(record, path, value):
    out = copy.deepcopy(record)
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    if isinstance(value, str) and value == "gone":
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return out


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["vllm", "prime_rl", *FLAT])
def test_every_field(name):
    record, refused = READERS[name].write([plain()] if name in FLAT else turns()), 0
    assert read(name, copy.deepcopy(record))
    for path in paths(record):
        for value in [*ODD, "gone"]:
            try:
                for episode in read(name, damaged(record, path, value)):
                    to_samples(episode)
            except MmpackError as error:
                assert "\n" not in str(error) and "Fix: " in str(error), (path, value)
                refused += 1
            except Exception as error:
                raise AssertionError(f"{path} as {value!r:.60} raises {error!r:.200}") from error
    assert refused


CHOICE = (0, "response", "choices", 0)
LOGPROB = (*CHOICE, "logprobs", "content", 0, "logprob")
VERSION = (*CHOICE, "weight_versions", 0)
SCORE = ("rewards", "task", "score")
MASK = ("nodes", 1, "sampling_mask", "counts")


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("vllm", LOGPROB, -9999.0, "sampled token 0 has no logprob"),
        ("vllm", (*VERSION, "version"), None, "whole numbers and a name"),
        ("vllm", (*VERSION, "end"), 1.5, "whole numbers and a name"),
        ("prime_rl", ("nodes", 0, "token_ids", 0), 2.5, "prompt_ids"),
        ("prime_rl", ("nodes", 1, "mask", 1), -1, "expected 0 or 1"),
        ("prime_rl", SCORE, "gone", "score is None"),
        ("prime_rl", SCORE, float("nan"), "expected a finite number"),
        ("prime_rl", MASK, [3.0, 3.5], "expected whole numbers"),
        ("skyrl", ("loss_masks", 0), None, "has no loss_masks"),
        ("skyrl", ("rewards", 0), float("inf"), "expected a finite number"),
    ],
)
def test_no_number_is_made_up(name, path, value, message):
    """A field that was taken for another number, or for a mask of ones."""
    refuses(name, damaged(READERS[name].write([plain()]), path, value), message)


def refuses(name, record, message):
    with pytest.raises(ArgumentError, match=r"^[^\n]+\. Fix: [^\n]+$") as caught:
        read(name, record)
    assert message in str(caught.value)


def test_a_npy_file_that_promises_more_than_it_holds():
    text = npy(np.zeros((3, 1, 2), np.uint8))
    for shape in (b"(9999999999999, 1, 2)", b"(9" + b"9" * 30 + b", 1, 2)", b"((((((((("):
        raw = base64.b64decode(text)
        own = b"(3, 1, 2), }" + b" " * max(len(shape) - 9, 0)
        broken = raw.replace(own, shape.ljust(9) + b", }")
        assert broken != raw and len(broken) == len(raw)
        given = base64.b64encode(broken).decode()
        record = damaged(READERS["vllm"].write([plain()]), (*CHOICE, "routed_experts"), given)
        refuses("vllm", record, "not base64 of a .npy file")


def test_names_of_versions_are_texts_or_numbers():
    for name in (None, 1.5, {}, True):
        record = Record([1], [2], policy_versions=[(0, 1, name)])
        with pytest.raises(ArgumentError, match=r"policy_versions\[0\] is .+ a name"):
            from_records([record], processor(), trajectory_id="e", group_id="g")
