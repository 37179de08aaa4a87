"""pad: rectangles against a loop over samples and tokens, left and right."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batches
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.forest import positions_of

SIDES = pytest.mark.parametrize("side", ["left", "right"])


@SIDES
@settings(max_examples=12)
@given(batch_samples=batches(), multiple=st.none() | st.integers(1, 9))
def test_rectangles(side, batch_samples, multiple):
    batch = mp.pad(batch_samples, side=side, pad_to_multiple_of=multiple)
    longest = max(map(len, batch_samples))
    width = longest + (-longest % multiple if multiple else 0)
    assert batch.input_ids.shape == (len(batch_samples), width) and batch.side == side
    pad_id = get_family(batch.family).pad_token_id
    n = 0
    for b, sample in enumerate(batch_samples):
        start = width - len(sample) if side == "left" else 0
        inside = range(start, start + len(sample))
        loss = {t for s in sample.loss_spans for t in range(s.start, s.stop)}
        places = positions_of(sample)
        for s in range(width):
            t = s - start
            here = s in inside
            assert batch.input_ids[b, s] == (sample.input_ids[t] if here else pad_id)
            assert batch.attention_mask[b, s] == here
            assert batch.visible_until[b, s] == (inside.stop if here else s + 1)
            assert batch.loss_mask[b, s] == (here and t in loss)
            rows = places if len(places) > 1 else places[:0]
            expected = [t, *rows[:, t]] if here else [0] * (1 + len(rows))
            assert batch.position_ids[:, b, s].tolist() == expected
        for t in sorted(loss):
            assert batch.loss_rows[n] == b * width + start + t - 1
            assert batch.loss_targets[n] == sample.input_ids[t]
            n += 1
    assert n == batch.num_loss_tokens == batch.loss_mask.sum()
    for ids, sample in zip(
        batch.unpack_tokens(batch.input_ids.flatten()), batch_samples, strict=True
    ):
        np.testing.assert_array_equal(ids, sample.input_ids)


@SIDES
@settings(max_examples=12)
@given(batch_samples=batches())
def test_loss_columns_are_those_of_a_pack(side, batch_samples):
    padded, packed = mp.pad(batch_samples, side=side), mp.pack(batch_samples)
    names = "loss_targets cu_loss loss_turn loss_token_index region_rows group_index"
    for name in [*names.split(), "media_occurrence", "vision_token_offsets"]:
        assert torch.equal(getattr(padded, name), getattr(packed, name)), name
    assert padded.loss_columns.keys() == packed.loss_columns.keys()
    assert padded.media_cache_keys == packed.media_cache_keys


@SIDES
def test_rectangle_puts_values_at_the_loss_tokens(side):
    short = make_sample([("text", [1]), ("response", [2, 3])])
    batch = mp.pad([full_sample("a", replay=False), short], side)
    values = torch.arange(1.0, 14, requires_grad=True)
    out = batch.rectangle(values, fill=-1.0)
    assert out.shape == batch.input_ids.shape
    assert torch.equal(out[batch.loss_mask], values)
    assert (out[~batch.loss_mask] == -1).all()
    out.sum().backward()
    assert (values.grad == 1).all()
    assert batch.rectangle(torch.arange(13)).dtype == torch.int64
    for wrong in (torch.zeros(12), torch.zeros(13, 2)):
        with pytest.raises(mp.ArgumentError, match="rectangle"):
            batch.rectangle(wrong)


@SIDES
def test_token_columns_are_zero_at_the_padding(side):
    a, b = make_sample([("text", [1, 2, 3])], "a"), make_sample([("text", [4])], "b")
    batch = mp.pad([a, b], side, token_columns={"x": np.asarray([[1.0], [2], [3], [4]])})
    last = [0, 0, 4] if side == "left" else [4, 0, 0]
    assert batch.token_columns["x"].flatten().tolist() == [1, 2, 3, *last]


@SIDES
def test_an_empty_sample_is_a_row_of_padding(side):
    empty, other = make_sample([], "empty"), make_sample([("text", [1, 2])], "other")
    batch = mp.pad([empty, other], side)
    assert batch.attention_mask.tolist() == [[0, 0], [1, 1]]
    assert batch.visible_until.tolist() == [[1, 2], [2, 2]]
    assert [len(x) for x in batch.unpack_tokens(batch.input_ids.flatten())] == [0, 2]
    with pytest.raises(mp.ArgumentError, match="pad: no sample has a token"):
        mp.pad([empty], side)
