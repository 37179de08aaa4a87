"""Kimi K2.5: videos whose frames the tower averages, latent attention on every backend, routes, cached prefixes."""

import dataclasses

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
    kv_bytes_per_token,
    model_inputs,
    packed_logprobs,
    prefix_logprobs,
    record_routes,
    router_loss,
)
from mmpack.adapters.transformers import tower_attention as adapter
from mmpack.adapters.transformers.attention import head_dim_of
from mmpack.adapters.transformers.tower import takes_encoded_media
from mmpack.adapters.transformers.tower_attention import on_their_device, takes_known
from mmpack.cache import PrefixIndex, RowStore
from mmpack.contracts import TOLERANCES
from mmpack.ops.attention import plan_attention, tree_attention

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


def test_a_tower_that_takes_nothing_keeps_its_forward(model, monkeypatch):
    """As transformers 5.13 and 5.14 have it: the grids go to the device, and the tower makes all by itself."""
    from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

    tower, (pixels, grids) = model.model.vision_tower, tower_input()
    wanted = tower(pixels, grid_thw=grids).pooler_output
    with monkeypatch.context() as patch:
        patch.delattr(kimi, "get_vision_frame_index", raising=False)
        assert not takes_known(tower)
    monkeypatch.setattr(adapter, "takes_known", lambda _: False)
    with attach(model):
        assert relative(tower(pixels, grid_thw=grids).pooler_output, wanted) <= 1e-6
        moved = on_their_device(model, {"pixel_values": pixels.to("meta"), "grid_thw": grids})
    assert moved["grid_thw"].device.type == "meta"


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_attached_tower_is_told_all_that_follows_from_grids(model, by_keyword, monkeypatch):
    """The grids stay on the host, so what the tower itself makes of them would be there too."""
    from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

    def without_grids(make):
        def given(grid_thw, *args, kwargs=None, **more):
            grids = grid_thw if kwargs is None else None  # with kwargs the tower asks
            return make(grids, *args, kwargs=kwargs, **more)

        return given

    pixels, grids = tower_input()
    given = {"pixel_values": pixels} if by_keyword else {}
    tower = model.model.vision_tower
    if not takes_known(tower):
        pytest.skip("this transformers' tower makes all by itself")
    wanted = tower(pixels, grid_thw=grids)
    for name in dir(kimi):
        if name.startswith("get_vision_"):
            monkeypatch.setattr(kimi, name, without_grids(getattr(kimi, name)))
    with pytest.raises(Exception, match="None"):
        tower(pixels, grid_thw=grids)
    with attach(model):
        found = tower(*([] if by_keyword else [pixels]), grid_thw=grids, **given)
    for name in ("last_hidden_state", "pooler_output"):
        assert relative(found[name], wanted[name]) <= 1e-6, name


@pytest.mark.gpu
def test_the_tower_waits_for_nothing():
    model = small_model("kimi_k25").to("cuda", torch.bfloat16)
    if not takes_known(model.model.vision_tower):
        pytest.skip("this transformers' tower makes all by itself")
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


def relative(found, wanted):
    return (found - wanted).norm() / wanted.norm()


def test_a_frame_of_a_run_matters(model):
    """The comparison above can see a piece that is lost or averaged with another."""
    if not takes_encoded_media(model):
        pytest.skip("this transformers takes no encoded media")
    samples = clips()[:1]
    with attach(model), torch.no_grad():
        right = packed_logprobs(model, mp.pack(samples))
        pixels = samples[0].media[0].pixel_values
        pixels[-16:] = pixels[-32:-16]  # the last frame
        wrong = packed_logprobs(model, mp.pack(samples))
    assert (right - wrong).abs().max() > 1e-4


def test_a_padded_clip_is_refused_by_one_line(model):
    with pytest.raises(mp.ModelError, match=r"can't encode videos, .*Fix: use mp\.pack, attach"):
        model_inputs(mp.pad(clips()), model)


def test_a_run_of_the_wrong_length_is_a_broken_rule():
    sample = clips()[0]
    sample.modality_spans[1] = dataclasses.replace(
        sample.modality_spans[1], stop=sample.modality_spans[1].stop - 1
    )
    assert {"MM101", "MM104"} & {p.code for p in mp.validate([sample])}
    sample = clips()[0]
    sample.media[0].grid_thw = (9, 4, 4)  # three runs
    sample.media[0].num_tokens = 12
    assert "MM111" in {p.code for p in mp.validate([sample])}


@pytest.mark.parametrize("backend", ["sdpa", "fixed_blocks"])
@pytest.mark.parametrize("lse", [False, True])
def test_values_narrower_than_keys(backend, lse):
    torch.manual_seed(0)
    until = torch.tensor([9, 9, 9, 6, 6, 6, 9, 9, 9], dtype=torch.int32)
    rows = torch.arange(9)
    q, k = torch.randn(2, 1, 2, 9, 24, dtype=torch.float64)
    v = torch.randn(1, 2, 9, 16, dtype=torch.float64, requires_grad=True)
    mask = (rows[None] <= rows[:, None]) & (rows[:, None] < until[None].long())
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    (expected,) = torch.autograd.grad(wanted.square().sum(), v)
    plan = plan_attention(until.numpy(), np.zeros(9, dtype=bool))
    found = tree_attention(q, k, v, until, plan, backend=backend, return_lse=lse)
    out = found[0] if lse else found
    assert out.shape == (1, 9, 2, 16)
    assert (out.transpose(1, 2) - wanted).abs().max() <= 1e-6
    (gradient,) = torch.autograd.grad(out.square().sum(), v)
    assert (gradient - expected).abs().max() <= 1e-5


def test_the_plan_is_chosen_for_heads_of_queries_and_keys(model):
    assert head_dim_of(model.config.get_text_config()) == 24


def test_routes_are_replayed_in_layers_with_experts(model):
    """transformers' own forward says which experts a sample takes; replayed, a pack takes these."""
    samples = mixed_batch("kimi_k25")
    with torch.no_grad():
        for sample in samples:
            with record_routes(model) as routes:
                model(**model_inputs(mp.pad([sample]), model))
            sample.routed_experts = routes.rows.numpy().astype(np.uint8)
        wanted = [packed_logprobs(model, mp.pad([s])) for s in samples]
        with attach(model), record_routes(model) as routes:
            batch = mp.pack(samples, share_prefix=True)
            found = packed_logprobs(model, batch)
            assert torch.equal(
                routes.rows.sort(-1).values, batch.routed_experts.long().sort(-1).values
            )
            assert (found - torch.cat(wanted)).abs().max() <= CLOSE
            for sample in samples:  # experts that the router would not take
                sample.routed_experts = (sample.routed_experts + 1) % 8
            other = packed_logprobs(model, mp.pack(samples, share_prefix=True))
    assert (found - other).abs().max() > 1e-3
    with pytest.raises(mp.ModelError, match="a bias balances them"):
        router_loss(model, batch, (torch.zeros(1),))


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
