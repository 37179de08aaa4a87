"""TensorDicts of samples and batches: equal when read back, and of the same memory."""

import numpy as np
import pytest

pytest.importorskip("tensordict")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pictured import pictured
from support.same import assert_equal
from support.samples import full_sample, samples
from tensordict import TensorDict

import mmpack as mp
from mmpack.adapters.tensordict import from_tensordict, to_tensordict

pytestmark = pytest.mark.plane


@pytest.mark.parametrize("jagged", [False, True])
@settings(max_examples=20)
@given(given_samples=st.lists(samples(replay=True), min_size=1, max_size=3))
def test_random_samples_return(given_samples, jagged):
    td = to_tensordict(given_samples, jagged=jagged)
    assert td.batch_size == torch.Size([len(given_samples)])
    assert from_tensordict(td) == given_samples


@pytest.mark.parametrize("jagged", [False, True])
def test_every_field_and_pixels_return(jagged):
    """Memory is shared both ways."""
    given_samples = pictured()
    given_samples[1].metadata["of tomorrow"] = {"x": [1, None]}
    given_samples[2].kept_ids = None  # a column that not all have
    td = to_tensordict(given_samples, jagged=jagged)
    again = from_tensordict(td)
    assert again == given_samples and again[1].metadata["of tomorrow"] == {"x": [1, None]}
    for a, b in zip(again, given_samples, strict=True):
        for mine, theirs in zip(a.media, b.media, strict=True):
            assert mine.pixel_values.data_ptr() == theirs.pixel_values.ctypes.data
            assert np.array_equal(mine.pixel_values.numpy(), theirs.pixel_values)
    if jagged:  # torch cuts no nested tensors
        return
    assert from_tensordict(td[1:]) == given_samples[1:]
    for name in ("input_ids", "position_ids", "rollout_logprobs", "routed_experts"):
        for row, a, b in zip(td.tensordicts, again, given_samples, strict=True):
            where = getattr(b, name).ctypes.data
            assert row[name].data_ptr() == where == getattr(a, name).ctypes.data
    key = given_samples[0].media[0].cache_key
    first, second = (row["pixel_values", key] for row in td.tensordicts[:2])
    assert first.data_ptr() == second.data_ptr()  # one picture of two samples


def test_jagged_columns_are_nested_tensors_of_the_arrays():
    given_samples = pictured()
    td = to_tensordict(given_samples, jagged=True)
    for name in ("input_ids", "rollout_logprobs", "kept_ids.ids"):
        assert td[name].is_nested
    parts = td["input_ids"].unbind()
    assert [p.tolist() for p in parts] == [s.input_ids.tolist() for s in given_samples]
    assert list(td["group_id"]) == ["g0"] * 3
    shapes = [tuple(p.shape) for p in td["position_ids"].unbind()]
    assert shapes == [(len(s), 3) for s in given_samples]


def test_columns_that_came_later_count():
    given_samples = pictured(2)
    td = to_tensordict(given_samples)
    td.tensordicts[0]["rollout_logprobs"] = torch.zeros(given_samples[0].num_loss_tokens)
    td.tensordicts[0]["advantages"] = torch.ones(1)
    first, second = from_tensordict(td)
    assert not first.rollout_logprobs.any() and second == given_samples[1]
    assert td.tensordicts[0]["advantages"] == 1  # no field: it stays where it is


def packed(**options):
    ours = pictured(2)
    for sample in ours:
        sample.codec_ids = None
    columns = {"advantages": [np.ones(s.num_loss_tokens, np.float32) for s in ours]}
    return mp.pack(ours, loss_columns=columns, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_returns_with_the_same_memory(shared):
    batch = packed(share_prefix=shared)
    td = to_tensordict(batch)
    again = from_tensordict(td)
    for name in ("input_ids", "position_ids", "visible_until", "loss_rows", "pixel_values"):
        where = getattr(batch, name).data_ptr()
        assert td[name].data_ptr() == where == getattr(again, name).data_ptr()
    where = batch.loss_columns["advantages"].data_ptr()
    assert td["loss_columns", "advantages"].data_ptr() == where
    assert_equal(again.loss_columns, batch.loss_columns)
    assert again.sample_ids == batch.sample_ids and again.media == batch.media
    assert again.kept_ids is batch.kept_ids and again.stats == batch.stats
    x = torch.arange(len(batch.input_ids))
    assert_equal(again.unpack_tokens(x), batch.unpack_tokens(x))


def test_a_batch_that_was_changed():
    batch = packed()
    td = to_tensordict(batch)
    td["loss_columns", "old_logprobs"] = torch.zeros(batch.num_loss_tokens)
    names = {"advantages", "old_logprobs", "rollout_logprobs"}
    assert set(from_tensordict(td).loss_columns) == names
    td["visible_until"] = td["visible_until"].clone().fill_(1)
    with pytest.raises(mp.ArgumentError, match="the plan was made of another visible_until"):
        from_tensordict(td)


def test_what_is_refused():
    td = to_tensordict([full_sample()], jagged=True)
    wrong = full_sample()
    wrong.input_ids = wrong.input_ids.astype(np.int32)
    bare = TensorDict({"input_ids": torch.zeros(1, 3)}, batch_size=[1])
    for call, error, said in (
        (lambda: to_tensordict([3]), mp.ArgumentError, r"to_tensordict: samples\[0\] is int"),
        (lambda: from_tensordict([]), mp.ArgumentError, "from_tensordict: this is of type list"),
        (lambda: from_tensordict(bare), mp.errors.TraceError, r"row 0\.record: is missing"),
        (
            lambda: from_tensordict(td.exclude("rollout_logprobs")),
            mp.errors.TraceError,
            "is missing, which its record names",
        ),
        (lambda: to_tensordict([wrong]), mp.errors.TraceError, "is int32, expected"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert from_tensordict(to_tensordict([])) == []
