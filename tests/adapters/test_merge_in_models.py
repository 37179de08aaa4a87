"""merge_embeddings and project_and_merge before a text model: what its own merge gives, and gradients of the tower."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from support.models import relative_difference, small_model, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, tower
from mmpack.adapters.transformers.tower import takes_encoded_media
from mmpack.ops.embeddings.merge import merge_embeddings
from mmpack.packing.pixels import float_pixels

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]
GRIDS = {"internvl": [(1, 4, 4), (2, 4, 4)]}


def some_batch(family):
    """Two prompts, of three and two responses; one picture is in both, twice in one of them."""
    one, two = GRIDS.get(family, [(1, 8, 6), (1, 4, 4)])
    first, second = ("image", one, "x"), ("image", two, "y")
    prompts = [[("text", range(9)), first], [second, ("text", [7, 8]), first, ("text", [3]), first]]
    parts = [[*prompts[k > 2], ("response", range(20 * k, 20 * k + 12))] for k in range(5)]
    samples = with_pixels([make_sample(p, f"s{i}", family=family) for i, p in enumerate(parts)])
    return mp.pack(samples, share_prefix=True)


def last_layers(core):
    """The projector's last layer, then those of the deepstack levels."""
    if hasattr(core, "multi_modal_projector"):
        return [core.multi_modal_projector.linear_2]
    merger = core.visual.merger
    if hasattr(merger, "mlp"):
        return [merger.mlp[-1]]
    return [m.linear_fc2 for m in (merger, *getattr(core.visual, "deepstack_merger_list", ()))]


def hidden_states(model, batch, project):
    """[T, H]: features written by merge_embeddings, or the tower's last layers run in project_and_merge only."""
    core, layers = model.model, last_layers(model.model) if project else []
    grids, pixels = [m.grid_thw for m in batch.media], float_pixels(batch)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "forward", lambda x: x))
        given = tower._tower_arguments(batch.family_of(), "image", pixels, grids)
        made = tower._encode(model, "image", given)
    pooled = made.pooler_output
    levels = [pooled.flatten(0, 1) if torch.is_tensor(pooled) else torch.cat(tuple(pooled))]
    for x in getattr(made, "deepstack_features", None) or []:  # from 5.19 on, by medium
        levels.append(x if torch.is_tensor(x) else torch.cat(tuple(x)))
    embeddings = core.get_input_embeddings()(batch.input_ids)
    if project:
        pairs = zip(levels, layers, strict=True)
        first, *rest = [mp.Projection(x, layer.weight, layer.bias) for x, layer in pairs]
        merged, taken = mp.project_and_merge(embeddings, first, batch.vision_rows, rest)
    else:
        merged, taken = merge_embeddings(embeddings, levels[0], batch.vision_rows, levels[1:])
    mask = batch.vision_rows.source[None] >= 0
    positions = batch.position_ids[:, None]
    return core.get_decoder()(
        inputs_embeds=merged[None],
        position_ids=positions if len(positions) > 1 else positions[0],
        visible_until=batch.visible_until,
        use_cache=False,
        **({"visual_pos_masks": mask, "deepstack_visual_embeds": taken} if taken else {}),
    ).last_hidden_state[0]


def with_gradients(hidden, model):
    """Detached, and the gradients of a sum in which every value weighs another amount."""
    weight = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)
    model.zero_grad(set_to_none=True)
    (hidden * weight).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return hidden.detach(), gradients


@pytest.mark.few(4)
@pytest.mark.adapter
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_merges_the_same(family, project):
    model, batch = small_model(family), some_batch(family)
    with attach(model):
        ours, our_gradients = with_gradients(hidden_states(model, batch, project), model)
        theirs = model.model(**model_inputs(batch, model)).last_hidden_state[0]
        expected, gradients = with_gradients(theirs, model)
    if takes_encoded_media(model) and not project:
        assert torch.equal(ours, expected)
    assert (ours - expected).abs().max() <= 1e-5
    assert relative_difference(our_gradients, gradients) <= 1e-5
    layers = {id(p) for layer in last_layers(model.model) for p in layer.parameters()}
    assert layers <= {id(p) for n, p in model.named_parameters() if our_gradients[n].any()}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_gradients_of_the_tower_are_the_same_bits_twice(family, no_tf32):
    model, batch = small_model(family), some_batch(family)
    with attach(model):
        expected, expected_gradients = with_gradients(hidden_states(model, batch, False), model)
        model, batch = model.cuda(), batch.to("cuda")
        hidden, first = with_gradients(hidden_states(model, batch, False), model)
        again, second = with_gradients(hidden_states(model, batch, False), model)
    assert (hidden.cpu() - expected).abs().max() <= 1e-4
    on_cpu = {n: g.cpu() for n, g in first.items()}
    assert relative_difference(on_cpu, expected_gradients) <= 1e-4
    assert torch.equal(hidden, again)
    seeing = [n for n in first if "visual" in n]
    assert seeing and all(torch.equal(first[n], second[n]) for n in seeing)
