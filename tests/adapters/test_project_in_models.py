"""project_and_merge in the place of the last layers of each family's projector: what the model's own merge gives."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from support.models import relative_difference, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, tower
from mmpack.packing.pixels import float_pixels

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl"]
GRIDS = {"internvl": [(1, 4, 4), (2, 4, 4)]}


def some_batch(family, share_prefix):
    """Two prompts, of three and two responses; one picture is in both, twice in one of them."""
    one, two = GRIDS.get(family, [(1, 8, 6), (1, 4, 4)])
    first, second = ("image", one, "x"), ("image", two, "y")
    prompts = [[("text", range(9)), first], [second, ("text", [7, 8]), first, ("text", [3]), first]]
    parts = [[*prompts[k > 2], ("response", range(20 * k, 20 * k + 12))] for k in range(5)]
    samples = with_pixels([make_sample(p, f"s{i}", family=family) for i, p in enumerate(parts)])
    return mp.pack(samples, share_prefix=share_prefix)


def last_layers(core):
    """The projector's last layer, then those of the deepstack levels."""
    if hasattr(core, "multi_modal_projector"):
        return [core.multi_modal_projector.linear_2]
    merger = core.visual.merger
    if hasattr(merger, "mlp"):
        return [merger.mlp[-1]]
    return [m.linear_fc2 for m in (merger, *getattr(core.visual, "deepstack_merger_list", ()))]


def encoded(model, batch):
    family, everything = batch.family_of(), list(range(len(batch.media)))
    grids = [m.grid_thw for m in batch.media]
    pixels = float_pixels(batch, everything)
    return tower._encode(model, "image", tower._tower_arguments(family, "image", pixels, grids))


def by_projecting(model, batch):
    """Hidden states [T, H]; the tower's last layers run in project_and_merge only."""
    core = model.model
    layers = last_layers(core)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "forward", lambda x: x))
        made = encoded(model, batch)
    pooled = made.pooler_output
    levels = [pooled.flatten(0, 1) if torch.is_tensor(pooled) else torch.cat(tuple(pooled))]
    for x in getattr(made, "deepstack_features", None) or []:  # from 5.19 on, by medium
        levels.append(x if torch.is_tensor(x) else torch.cat(tuple(x)))
    projections = [
        mp.Projection(x, layer.weight, layer.bias) for x, layer in zip(levels, layers, strict=True)
    ]
    embeddings = core.get_input_embeddings()(batch.input_ids)
    merged, taken = mp.project_and_merge(
        embeddings, projections[0], batch.vision_rows, projections[1:]
    )
    deep = {}
    if taken:
        mask = batch.vision_rows.source[None] >= 0
        deep = {"visual_pos_masks": mask, "deepstack_visual_embeds": taken}
    positions = batch.position_ids[:, None]
    return core.get_decoder()(
        inputs_embeds=merged[None],
        position_ids=positions if len(positions) > 1 else positions[0],
        visible_until=batch.visible_until,
        use_cache=False,
        **deep,
    ).last_hidden_state[0]


def hidden_and_gradients(hidden, model):
    """Detached, and the gradients of a sum in which every value weighs another amount."""
    weight = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    model.zero_grad(set_to_none=True)
    (hidden * weight).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return hidden.detach(), gradients


@pytest.mark.few(3)
@pytest.mark.adapter
@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_projects_the_same(family, share_prefix):
    model, batch = tiny_model(family), some_batch(family, share_prefix)
    with attach(model):
        ours, our_gradients = hidden_and_gradients(by_projecting(model, batch), model)
        theirs = model.model(**model_inputs(batch, model)).last_hidden_state[0]
        expected, gradients = hidden_and_gradients(theirs, model)
    assert (ours - expected).abs().max() <= 1e-5
    assert relative_difference(our_gradients, gradients) <= 1e-5
    layers = {id(p) for layer in last_layers(model.model) for p in layer.parameters()}
    assert layers <= {id(p) for n, p in model.named_parameters() if our_gradients[n].any()}
