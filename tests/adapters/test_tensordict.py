"""TensorDicts of samples and batches: equal when read back, and of the same memory."""

import numpy as np
import pytest

pytest.importorskip("tensordict")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.same import assert_equal
from support.samples import full_sample, samples
from tensordict import LazyStackedTensorDict, TensorDict

import mmpack as mp
from mmpack.adapters.tensordict import from_tensordict, to_tensordict

pytestmark = pytest.mark.plane


def pictured(count=3):
    """Samples with every field and pixels; the pixels of a medium are one array."""
    made = [full_sample(f"s{i}", seed=i) for i in range(count)]
    rng, store = np.random.default_rng(0), {}
    for sample in made:
        for medium in sample.media:
            size = (medium.num_patches, 1176)
            pixels = store.setdefault(medium.cache_key, rng.random(size, np.float32))
            medium.pixel_values = pixels
    return made


@pytest.mark.parametrize("jagged", [False, True])
@settings(max_examples=20)
@given(given_samples=st.lists(samples(replay=True), min_size=1, max_size=3))
def test_random_samples_return(given_samples, jagged):
    td = to_tensordict(given_samples, jagged=jagged)
    assert td.batch_size == torch.Size([len(given_samples)])
    assert from_tensordict(td) == given_samples


@pytest.mark.parametrize("jagged", [False, True])
def test_every_field_and_pixels_return(jagged):
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
    if not jagged:  # torch cuts no nested tensors
        assert from_tensordict(td[1:]) == given_samples[1:]


def test_memory_is_shared_both_ways():
    given_samples = pictured()
    td = to_tensordict(given_samples)
    assert isinstance(td, LazyStackedTensorDict)
    again = from_tensordict(td)
    for name in ("input_ids", "position_ids", "rollout_logprobs", "routed_experts"):
        for row, a, b in zip(td.tensordicts, again, given_samples, strict=True):
            assert (
                row[name].data_ptr() == getattr(b, name).ctypes.data == getattr(a, name).ctypes.data
            )
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
    ours = [mp.Sample.from_dict(s.to_dict()) for s in pictured(2)]
    for a, b in zip(ours, pictured(2), strict=True):
        a.codec_ids = None
        for mine, theirs in zip(a.media, b.media, strict=True):
            mine.pixel_values = theirs.pixel_values
    columns = {"advantages": [np.ones(s.num_loss_tokens, np.float32) for s in ours]}
    return mp.pack(ours, loss_columns=columns, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_returns_with_the_same_memory(shared):
    batch = packed(share_prefix=shared)
    td = to_tensordict(batch)
    again = from_tensordict(td)
    for name in ("input_ids", "position_ids", "visible_until", "loss_rows", "pixel_values"):
        assert (
            td[name].data_ptr()
            == getattr(again, name).data_ptr()
            == getattr(batch, name).data_ptr()
        )
    assert (
        td["loss_columns", "advantages"].data_ptr() == batch.loss_columns["advantages"].data_ptr()
    )
    assert_equal(again.loss_columns, batch.loss_columns)
    assert again.sample_ids == batch.sample_ids and again.media == batch.media
    assert again.kept_ids is batch.kept_ids and again.stats == batch.stats
    x = torch.arange(len(batch.input_ids))
    assert_equal(again.unpack_tokens(x), batch.unpack_tokens(x))


def test_a_batch_that_was_changed():
    batch = packed()
    td = to_tensordict(batch)
    td["loss_columns", "old_logprobs"] = torch.zeros(batch.num_loss_tokens)
    assert set(from_tensordict(td).loss_columns) == {
        "advantages",
        "old_logprobs",
        "rollout_logprobs",
    }
    td["visible_until"] = td["visible_until"].clone().fill_(1)
    with pytest.raises(mp.ArgumentError, match="the plan was made of another visible_until"):
        from_tensordict(td)


def test_what_is_refused():
    with pytest.raises(mp.ArgumentError, match=r"to_tensordict: samples\[0\] is int"):
        to_tensordict([3])
    with pytest.raises(mp.ArgumentError, match="from_tensordict: this is of type list"):
        from_tensordict([])
    with pytest.raises(mp.TraceError, match=r"row 0\.record: is missing"):
        from_tensordict(TensorDict({"input_ids": torch.zeros(1, 3)}, batch_size=[1]))
    td = to_tensordict([full_sample()], jagged=True)
    with pytest.raises(
        mp.TraceError, match=r"rollout_logprobs: is missing, which its record names"
    ):
        from_tensordict(td.exclude("rollout_logprobs"))
    wrong = full_sample()
    wrong.input_ids = wrong.input_ids.astype(np.int32)
    with pytest.raises(mp.TraceError, match="is int32, expected"):
        to_tensordict([wrong])


def test_nothing_at_all():
    assert from_tensordict(to_tensordict([])) == []
