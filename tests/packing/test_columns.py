"""Columns that the caller hands in, per loss token and per token: every form, and the errors by code."""

import numpy as np
import pytest
import torch
from support.samples import full_sample, make_sample

import mmpack as mp


def pair():
    """Two samples, one image and two tokens of text in common; 2 and 3 loss tokens."""
    prompt = [("image", (1, 4, 4), "x"), ("text", [1, 2])]
    return [
        make_sample([*prompt, ("response", [5, 6])], "a"),
        make_sample([*prompt, ("response", [5, 7, 8])], "b"),
    ]


VALUES = [[0.5, -1.0], [2.0, 3.0, 4.5]]
FLAT = [*VALUES[0], *VALUES[1]]


@pytest.mark.parametrize(
    "column",
    [
        VALUES,
        [torch.tensor(v) for v in VALUES],
        np.asarray(FLAT, dtype=np.float32),
        torch.tensor(FLAT),
        np.asarray([np.asarray(v) for v in VALUES], dtype=object),
    ],
)
@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_loss_columns_in_every_form(make, column):
    batch = make(pair(), loss_columns={"old_logprobs": column})
    assert batch.loss_columns["old_logprobs"].tolist() == FLAT
    pieces = batch.unpack_loss(batch.loss_columns["old_logprobs"])
    assert [p.tolist() for p in pieces] == VALUES


def test_dtypes_are_promoted_and_empty_pieces_have_none():
    a, b = pair()
    none = make_sample([("text", [1])], "none")
    big = 2**40 + 1
    ids = mp.pack([none, a, b], loss_columns={"x": [[], [big, 1], [2, 3, 4]]}).loss_columns["x"]
    assert ids.dtype == torch.int64 and ids[0] == big
    mixed = mp.pack([a, b], loss_columns={"x": [[1, 2], [0.5, 1.5, 2.5]]}).loss_columns["x"]
    assert mixed.tolist() == [1, 2, 0.5, 1.5, 2.5]
    wide = mp.pack([a, b], token_columns={"x": [np.ones(len(a), int), np.full(len(b), 0.5)]})
    assert wide.token_columns["x"].dtype == torch.float64
    assert wide.token_columns["x"][-1] == 0.5


@pytest.mark.parametrize(
    "column",
    [
        [[1.0, 2.0]],  # one piece for two samples
        [[1.0, 2.0], [1.0, 2.0]],  # a piece too short
        [1.0, 2.0],  # numbers, not pieces
        torch.tensor(3.0),
        [np.zeros((2, 3)), np.zeros((3, 2))],
        ["ab", "abc"],  # no numbers
        [[1.0, None], [1.0, 2.0, 3.0]],
    ],
)
def test_columns_of_the_wrong_length(column):
    with pytest.raises(mp.SchemaError, match="MM403"):
        mp.pack(pair(), loss_columns={"x": column})


def test_rollout_logprobs_come_along():
    a, b = pair()
    none = make_sample([("text", [1])], "none")
    assert "rollout_logprobs" not in mp.pack([a, b]).loss_columns
    a.rollout_logprobs = np.asarray([-1, -2], dtype=np.float32)
    assert "rollout_logprobs" not in mp.pack([a, b]).loss_columns
    b.rollout_logprobs = np.asarray([-3, -4, -5], dtype=np.float32)
    b.rollout_logprobs.setflags(write=False)  # as a reader may give it
    for batch in (mp.pack([none, a, b], share_prefix=True), mp.pad([none, a, b])):
        column = batch.loss_columns["rollout_logprobs"]
        assert column.tolist() == [-1, -2, -3, -4, -5] and column.dtype == torch.float32
    mine = mp.pack([a, b], loss_columns={"rollout_logprobs": np.zeros(5)})
    assert mine.loss_columns["rollout_logprobs"].tolist() == [0] * 5
    column[0] = 9
    assert a.rollout_logprobs[0] == -1


def token_values(samples, width=3):
    """Equal where rows are shared: they follow from the index and the id."""
    return [
        torch.stack(
            [torch.arange(len(s)) * k + torch.from_numpy(s.input_ids) for k in range(width)], 1
        )
        for s in samples
    ]


@pytest.mark.parametrize("share", [False, True])
def test_token_columns_round_trip(share):
    batch_samples = pair()
    values = token_values(batch_samples)
    for column in (values, torch.cat(values), [v.tolist() for v in values]):
        batch = mp.pack(
            batch_samples, share_prefix=share, pad_to_multiple_of=64, token_columns={"r": column}
        )
        packed = batch.token_columns["r"]
        assert packed.shape == (len(batch.input_ids), 3)
        assert (packed[batch.num_tokens :] == 0).all()
        for a, b in zip(batch.unpack_tokens(packed), values, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (1.0, 1.0, True),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1.0, float("nan"), False),
        (1.0, 1.0 + 2**-23, False),
    ],
)
def test_shared_rows_agree_bit_for_bit(first, second, equal):
    a, b = pair()
    common = 9  # image with its two marks, text, and the first response token
    values = [torch.zeros(len(a)), torch.zeros(len(b))]
    values[0][4], values[1][4] = first, second
    values[1][common:] = 7.0  # not shared: may differ
    call = {"samples": [a, b], "token_columns": {"x": values}}
    mp.pack(**call)
    if equal:
        batch = mp.pack(**call, share_prefix=True)
        bits = [v.view(torch.int32) for v in batch.unpack_tokens(batch.token_columns["x"])]
        assert all(torch.equal(x, v.view(torch.int32)) for x, v in zip(bits, values, strict=True))
    else:
        with pytest.raises(mp.SchemaError, match=r"'x'.* differs at token 4 .*MM402"):
            mp.pack(**call, share_prefix=True)


@pytest.mark.parametrize("flat", [False, True])
def test_dropped_samples_take_their_columns_with_them(flat):
    bad, a, b = full_sample("bad"), *pair()
    bad.loss_spans[0].start = 0
    wrong = bad.num_loss_tokens
    loss = [[9.0] * wrong, *VALUES]
    tokens = [np.full(len(bad), 9), np.arange(len(a)), np.arange(len(b))]
    if flat:
        loss, tokens = np.concatenate(loss), np.concatenate(tokens)
    batch = mp.pack(
        [bad, a, b], on_invalid="drop", loss_columns={"x": loss}, token_columns={"t": tokens}
    )
    assert batch.loss_columns["x"].tolist() == FLAT
    assert batch.token_columns["t"].tolist() == [*range(len(a)), *range(len(b))]
    with pytest.raises(mp.SchemaError, match="MM403"):  # a column of only the kept ones
        mp.pack([bad, a, b], on_invalid="drop", loss_columns={"x": VALUES})
