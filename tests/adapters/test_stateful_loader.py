"""torchdata's StatefulDataLoader over batches packed in workers: a run that was cut goes on, bit for bit."""

import functools
import json

import numpy as np
import pytest
from support.same import assert_equal
from support.samples import make_sample

pytest.importorskip("torchdata.stateful_dataloader")
from torchdata.stateful_dataloader import StatefulDataLoader

import mmpack as mp
from mmpack.adapters.torch import PackBatches, PackLoader

pytestmark = pytest.mark.plane
OPTIONS = {"max_tokens": 30, "share_prefix": True}


def batches(kind, workers):
    rng, samples = np.random.default_rng(0), []
    for g in range(6):
        pixels = rng.random((16, 1176), np.float32)
        for k in range(3):
            parts = [("text", [g, 5, 6]), ("image", (1, 4, 4), f"p{g}")]
            parts.append(("response", list(range(g, g + 3 + k))))
            samples.append(make_sample(parts, f"g{g}-{k}", f"g{g}"))
            samples[-1].media[0].pixel_values = pixels
    if kind == "bins":
        collate = functools.partial(mp.collate, share_prefix=True)
        options = {"batch_sampler": mp.plan(samples, **OPTIONS).bins, "collate_fn": collate}
        return StatefulDataLoader(samples, num_workers=workers, **options)
    loader = PackLoader(samples, groups_per_step=2, shuffle=True, seed=3, **OPTIONS)
    dataset = PackBatches(loader)
    dataset.set_epoch(1)
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)


def fields(item):
    batch, *place = item if isinstance(item, tuple) else (item,)
    names = (
        "sample_ids",
        "input_ids",
        "position_ids",
        "visible_until",
        "loss_rows",
        "pixel_values",
    )
    return [getattr(batch, name) for name in names] + place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steps", "bins"])
def test_a_run_that_was_cut_goes_on_with_the_same_batches(kind):
    whole = [fields(item) for item in batches(kind, 0)]
    assert len(whole) > 4
    for workers in (0, 2):
        loader, before = batches(kind, workers), []
        for item in loader:
            before.append(fields(item))
            if len(before) == 3:
                state = json.loads(json.dumps(loader.state_dict()))
                break
        again = batches(kind, workers)
        again.load_state_dict(state)
        assert_equal(before + [fields(item) for item in again], whole)
