"""Samples without their pixels: the packs are the same bits, and what is sent is small."""

import pickle

import pytest
import torch
from support.batch_tensors import assert_same
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.blobs import BlobFolder, take


@pytest.fixture
def samples():
    return with_pixels(
        [
            make_sample(
                [
                    ("text", [1, 2]),
                    ("image", (1, 4, 4), f"picture-{g}"),
                    ("image", (1, 8, 4), "the same"),
                    ("response", [5, 6 + k]),
                ],
                f"s{g}/{k}",
                f"g{g}",
            )
            for g in range(3)
            for k in range(4)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packs_are_the_same_bits(samples, tmp_path, dtype):
    for sample in samples:
        for medium in sample.media:
            medium.pixel_values = torch.as_tensor(medium.pixel_values).to(dtype)
    before = pickle.dumps(samples)
    with BlobFolder(tmp_path) as store:
        lean = take(samples, store)
        assert len(store) == 4 and store.stats.written == 4 and store.stats.known == 20
        assert lean == samples and all(m.pixel_values is None for s in lean for m in s.media)
        assert all(m.pixel_values is not None for s in samples for m in s.media)
        sent = pickle.loads(pickle.dumps(lean))
        for share in (False, True):
            packed = mp.pack(sent, media=store, share_prefix=share)
            assert_same(packed, mp.pack(samples, share_prefix=share))
    pixels = sum(m.pixel_values.nbytes for s in samples for m in s.media)
    assert len(before) - len(pickle.dumps(lean)) > 0.1 * pixels
    with BlobFolder(tmp_path / "other") as store:
        assert take(lean, store) == lean and len(store) == 0  # there is nothing to take
