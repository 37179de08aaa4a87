"""merge_embeddings in front of a model's text part: what the model's own merge gives, and gradients of the tower."""

import pytest
import torch
from support.models import relative_difference, spread_out, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.transformers.tower import takes_encoded_media
from mmpack.ops.embeddings.merge import merge_embeddings

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


def some_batch(family):
    """Two prompts, each with an image, of three and two responses; one image is in both."""
    first, second = ("image", (1, 8, 6), "x"), ("image", (1, 4, 4), "y")
    prompts = [[("text", range(9)), first], [second, ("text", [7, 8]), first]]
    parts = [[*prompts[k > 2], ("response", range(20 * k, 20 * k + 12))] for k in range(5)]
    samples = with_pixels([make_sample(p, f"s{i}", family=family) for i, p in enumerate(parts)])
    return mp.pack(samples, share_prefix=True)


def by_merging(model, batch):
    """Hidden states [T, H], each medium encoded once, its features written by merge_embeddings."""
    core = model.model
    grids = torch.tensor([m.grid_thw for m in batch.media], device=batch.device)
    made = core.get_image_features(batch.pixel_values.to(model.dtype), grids, return_dict=True)
    levels = getattr(made, "deepstack_features", None) or []
    levels = [x if torch.is_tensor(x) else torch.cat(tuple(x)) for x in levels]
    embeddings = core.get_input_embeddings()(batch.input_ids)
    vision = batch.vision_rows
    merged, taken = merge_embeddings(
        embeddings, torch.cat(tuple(made.pooler_output)), vision, levels
    )
    deep = {}
    if taken:
        mask = vision.source[None] >= 0
        deep = {"visual_pos_masks": mask, "deepstack_visual_embeds": taken}
    return core.language_model(
        inputs_embeds=merged[None],
        position_ids=batch.position_ids[:, None],
        visible_until=batch.visible_until,
        use_cache=False,
        **deep,
    ).last_hidden_state[0]


def hidden_and_gradients(hidden, model):
    """Detached, and the gradients of a sum in which every value weighs another amount."""
    weight = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)
    model.zero_grad(set_to_none=True)
    (hidden.float() * weight).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return hidden.detach(), gradients


@pytest.mark.adapter
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_merges_the_same(family):
    model, batch = tiny_model(family), some_batch(family)
    with attach(model):
        ours, our_gradients = hidden_and_gradients(by_merging(model, batch), model)
        theirs = model.model(**model_inputs(batch, model)).last_hidden_state[0]
        expected, gradients = hidden_and_gradients(theirs, model)
    if takes_encoded_media(model):
        assert torch.equal(ours, expected)
    assert (ours - expected).abs().max() <= 1e-5
    assert relative_difference(our_gradients, gradients) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_tower_are_the_same_bits_twice(family, no_tf32):
    model, batch = spread_out(tiny_model(family)), some_batch(family)
    with attach(model):
        expected, expected_gradients = hidden_and_gradients(by_merging(model, batch), model)
        model, batch = model.cuda(), batch.to("cuda")
        hidden, first = hidden_and_gradients(by_merging(model, batch), model)
        again, second = hidden_and_gradients(by_merging(model, batch), model)
    assert (hidden.cpu() - expected).abs().max() <= 1e-4
    on_cpu = {n: g.cpu() for n, g in first.items()}
    assert relative_difference(on_cpu, expected_gradients) <= 1e-4
    assert torch.equal(hidden, again)
    tower = [n for n in first if "visual" in n]
    assert tower and all(torch.equal(first[n], second[n]) for n in tower)
