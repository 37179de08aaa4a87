"""Media that a processor made: as samples of one row, and back as the processor's names."""

import numpy as np
import pytest
import torch

import mmpack as mp
from mmpack.adapters.processed_media import inputs_of_media, media_of_inputs
from mmpack.adapters.row_sample import row_sample
from mmpack.errors import ArgumentError
from mmpack.families import get_family

FAMILY = get_family("qwen2_5_vl")


def videos(pixels, seconds):
    """A row of two videos [2, 4, 4] between text tokens, by `media_of_inputs`."""
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
