"""Kimi K2.5: videos whose frames the tower averages, latent attention on every backend, routes, cached prefixes."""

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.kits import get_kit
from support.kits.samples import draw_pixels, sample_of
from support.models import logprobs_and_gradients, relative_difference, small_model, weights_of
from support.waits import never_waits

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    model_inputs,
    packed_logprobs,
    prefix_logprobs,
)
from mmpack.adapters.transformers.prefix import kv_bytes_per_token
from mmpack.adapters.transformers.routes import router_loss
from mmpack.cache import PrefixIndex, RowStore
from mmpack.contracts import TOLERANCES
from mmpack.versions import takes_encoded_media

KIT = get_kit("kimi_k25")
pytestmark = [
    pytest.mark.adapter,
    pytest.mark.skipif(not KIT.available, reason="this transformers has no Kimi K2.5"),
]
CLOSE = TOLERANCES["layouts"].value


@pytest.fixture(scope="module")
def model():
    return small_model("kimi_k25")


def clips():
    """Six frames are a run of four and one of two; the clip comes in two samples of one prompt, another beside it."""
    rng = np.random.default_rng(5)

    def ids(kind, count):
        return kind, rng.integers(0, KIT.text_ids, count)

    prompt = [ids("text", 4), ("video", (6, 4, 4), "clip"), ids("text", 3)]
    parts = [
        [*prompt, ids("loss", 4)],
        [*prompt, ids("loss", 3), ("image", (1, 4, 6), "still"), ids("loss", 2)],
        [ids("text", 2), ("video", (4, 8, 4), "other"), ids("loss", 3)],
    ]
    samples = [sample_of(KIT, p, f"s{i}") for i, p in enumerate(parts)]
    draw_pixels(samples)
    return samples


def alone(model, samples):
    """Each sample by itself through the model's own text model; each piece of a clip alone through its own tower."""
    core, values = model.model, []
    for sample in samples:
        batch = mp.pad([sample])
        embeds = model.get_input_embeddings()(batch.input_ids)
        places = iter(sample.modality_spans)
        for medium in sample.media:
            pixels = torch.as_tensor(medium.pixel_values).view(-1, 3, 14, 14)
            _, h, w = medium.grid_thw
            for piece in pixels.split(4 * h * w):
                grid = torch.tensor([[len(piece) // (h * w), h, w]])
                made = core.mm_projector(core.vision_tower(piece, grid_thw=grid).pooler_output)
                span = next(places)
                rows = torch.arange(span.start, span.stop)
                embeds = embeds.index_copy(1, rows, made.squeeze(1)[None])
        hidden = core.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logp = model.lm_head(hidden)[0].log_softmax(-1)[batch.loss_rows.long()]
        values.append(logp.gather(1, batch.loss_targets[:, None])[:, 0])
    return torch.cat(values)


def test_clips_packed_and_shared(model):
    if not takes_encoded_media(model):
        pytest.skip("this transformers takes no encoded media")
    samples = clips()
    assert mp.validate(samples) == []
    wanted = alone(model, samples)
    model.zero_grad()
    (wanted * weights_of(mp.pack(samples))).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for share in (False, True):
        with attach(model):
            batch = mp.pack(samples, share_prefix=share)
            values, found = logprobs_and_gradients(model, batch)
        assert (values - wanted).abs().max() <= CLOSE, share
        assert relative_difference(found, expected) <= 2e-6, share
        assert batch.stats["patches_encoded"] == 6 * 16 + 24 + 4 * 32  # each medium once


@pytest.mark.gpu
def test_the_tower_waits_for_nothing():
    model = small_model("kimi_k25").to("cuda", torch.bfloat16)
    pixels, grids = tower_input()
    pixels = pixels.to("cuda", torch.bfloat16)

    def run():
        return model.model.vision_tower(pixels, grid_thw=grids).pooler_output

    with attach(model, text=False):
        never_waits(run)


def tower_input():
    """Patches of three clips, as many frames in each, and their grids."""
    grids = torch.tensor([[2, 4, 6], [2, 4, 4], [2, 8, 4]])
    torch.manual_seed(3)
    return torch.randn(int(grids.prod(-1).sum()), 3, 14, 14), grids


def test_a_padded_clip_is_refused_by_one_line(model):
    with pytest.raises(mp.ModelError, match=r"can't encode videos, .*Fix: use mp\.pack, attach"):
        model_inputs(mp.pad(clips()), model)
    with pytest.raises(mp.ModelError, match="a bias balances them"):
        router_loss(model, mp.pad(clips()), (torch.zeros(1),))


def test_a_cached_prefix_of_latent_attention(model):
    if not takes_encoded_media(model):
        pytest.skip("this transformers takes no encoded media")
    samples = mixed_batch("kimi_k25")[:2]
    width = kv_bytes_per_token(model)
    index = PrefixIndex(64 * 4 * width, bytes_per_token=width, block_size=4)
    kv = RowStore(index.num_rows)
    found = [prefix_logprobs(model, s, index, kv) for s in samples]
    assert [f.cached_tokens > 0 for f in found] == [False, True]
    with attach(model), torch.no_grad():
        for sample, own in zip(samples, found, strict=True):
            wanted = packed_logprobs(model, mp.pack([sample]))
            assert (own.logprobs - wanted).abs().max() <= CLOSE
