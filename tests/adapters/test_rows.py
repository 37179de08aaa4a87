"""What adapters keep beside a sample comes back from JSON as it was, bit for bit."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import mmpack as mp
from mmpack.adapters.exchange import (
    decode,
    encode,
    inputs_of_media,
    media_of_inputs,
    row_sample,
    true_runs,
)
from mmpack.errors import ArgumentError
from mmpack.families import get_family


def objects(values):
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


DTYPES = (np.float32, np.float64, np.int64, np.int16, np.uint8, np.bool_, np.dtype("<U3"))
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    )
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | ARRAYS
    | ARRAYS.filter(lambda a: a.dtype.kind != "U").map(torch.from_numpy)
    | st.floats(width=32).map(np.float32)
    | st.just(torch.tensor([1.5, float("nan")], dtype=torch.bfloat16))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["__tensor__", "__x"]), inner, max_size=3
        )
        | st.dictionaries(st.integers(), inner, max_size=2)
        | st.lists(inner, max_size=3).map(objects)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_everything_comes_back_from_json(value):
    assert_equal(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


def test_what_json_can_t_hold_stays_as_it_is():
    thing = object()
    assert decode(encode({"a": [thing]}))["a"][0] is thing


@pytest.mark.parametrize("flags", [[], [1], [0], [1, 1, 0, 1], [0, 1, 0, 0, 1, 1]])
def test_runs(flags):
    runs = true_runs(np.asarray(flags, dtype=bool))
    assert [i for a, b in runs for i in range(a, b)] == [i for i, f in enumerate(flags) if f]
    assert all(b < c for (_, b), (c, _) in pairwise(runs))


FAMILY = get_family("qwen2_5_vl")


def videos(pixels, seconds):
    """A row of two videos [2, 4, 4] between words, by `media_of_inputs`."""
    grids = torch.tensor([[2, 4, 4]] * 2)
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": grids}
    media = media_of_inputs(inputs | {"second_per_grid_ts": seconds}, FAMILY, "row")
    video = [FAMILY.vision_start_id] + [FAMILY.video_token_id] * 8 + [FAMILY.vision_end_id]
    ids = np.array([1, *video, 2, *video, 3, 4])
    scored = np.arange(len(ids)) == len(ids) - 1
    named = {"response_start": len(ids) - 1, "sample_id": "a", "group_id": "a"}
    return row_sample("row", ids, media, scored, FAMILY, **named)


def test_videos_of_equal_pixels_keep_their_seconds():
    pixels = torch.randn(32, FAMILY.patch_dim, generator=torch.Generator().manual_seed(0))
    sample = videos(pixels.repeat(2, 1), [1.0, 4.0])
    assert [m.second_per_grid_ts for m in sample.media] == [1.0, 4.0]
    assert [s.media_index for s in sample.modality_spans] == [0, 1]
    assert mp.validate([sample]) == []
    assert len(videos(pixels.repeat(2, 1), [4.0, 4.0]).media) == 1
    places = mp.pack([sample]).position_ids[-3]  # t, of t, h, w
    first, second = (places[s.start : s.stop].unique() for s in sample.modality_spans)
    assert second.diff().tolist() == (4 * first.diff()).tolist() != []
    with pytest.raises(ArgumentError, match="second_per_grid_ts has 1 entries"):
        videos(pixels.repeat(2, 1), [1.0])


def test_media_up_to_a_token():
    sample = videos(torch.zeros(64, FAMILY.patch_dim), [1.0, 4.0])
    stop = sample.modality_spans[1].stop
    for at, count in ((None, 2), (stop, 2), (stop - 1, 1), (1, 0)):
        assert len(inputs_of_media(sample, None, at).get("video_grid_thw", ())) == count
    assert inputs_of_media(sample)["second_per_grid_ts"].tolist() == [1.0, 4.0]


class OnDevice(torch.Tensor):
    """As a tensor on a GPU: numpy can't read it."""

    def __array__(self, dtype=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_grids_of_any_kind():
    pixels = torch.zeros(16, FAMILY.patch_dim)
    grid = torch.tensor([[1, 4, 4]])
    for grids in (grid, grid.as_subclass(OnDevice), grid.numpy(), [[1, 4, 4]], list(grid)):
        inputs = {"pixel_values": pixels, "image_grid_thw": grids}
        assert media_of_inputs(inputs, FAMILY, "row")["image"][0].grid_thw == (1, 4, 4)
    for grids in (grid[0], grid[:, :2]):
        with pytest.raises(ArgumentError, match="not \\[n, 3\\]"):
            media_of_inputs({"pixel_values": pixels, "image_grid_thw": grids}, FAMILY, "row")


def assert_equal(x, y):
    assert type(x) is type(y)
    if isinstance(y, torch.Tensor):
        assert x.dtype == y.dtype and x.shape == y.shape
        bits = [t.reshape(-1).clone().view(torch.uint8) for t in (x, y) if t.numel()]
        assert not bits or torch.equal(*bits)
    elif isinstance(y, np.ndarray) and y.dtype != object:
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    elif isinstance(y, dict):
        assert list(x) == list(y)
        for a, b in zip(x.values(), y.values(), strict=True):
            assert_equal(a, b)
    elif isinstance(y, list | tuple | np.ndarray):
        assert len(x) == len(y)
        for a, b in zip(x, y, strict=True):
            assert_equal(a, b)
    elif isinstance(y, float | np.floating):
        assert x == y or (np.isnan(x) and np.isnan(y))
    else:
        assert x == y
