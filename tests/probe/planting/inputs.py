"""Faults in what a model is given: positions, pixels, features, and the rows that are read at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmpack.families import get_family
from mmpack.layout.forest import positions_of
from planting.parts import (
    decoder_layers,
    first_rows,
    given_keyword,
    given_keywords,
    instead,
    merger_of,
    rotary,
    tower_blocks,
    tower_of,
)
from planting.registry import plant
from planting.scene import QWEN, Answer, Scene, Span

Tensor = torch.Tensor


@plant("positions of one picture shifted by one")
def shifted(scene: Scene, model: Any) -> Answer:
    span = scene.pick(scene.spans("image"))

    def change(positions: Tensor) -> Tensor:
        positions = positions.clone()
        if place := scene.rows.of(span):
            positions[..., place[0], place[1]] += 1
        return positions

    given_keyword(model.get_decoder(), "position_ids", change)
    return scene.answer(model, rotary(model), span.sample, span.start)


@plant("mRoPE's height and width dropped", *QWEN)
def time_only(scene: Scene, model: Any) -> Answer:
    """A picture's first row has the same number thrice: its second is the first that tells."""
    given_keyword(model.get_decoder(), "position_ids", lambda p: p[:1].expand(3, -1, -1))
    return scene.answer(
        model, rotary(model), *_first_where(scene, lambda t, h, w: (h != t) | (w != t))
    )


@plant("sections of height and width exchanged", *QWEN)
def exchanged_sections(scene: Scene, model: Any) -> Answer:
    given_keyword(model.get_decoder(), "position_ids", lambda p: p[[0, 2, 1]])
    return scene.answer(model, rotary(model), *_first_where(scene, lambda t, h, w: h != w))


@plant("a channel of a rotary section given to another", *QWEN)
def moved_section(scene: Scene, model: Any) -> Answer:
    """Time gets a channel that was height's; time and height differ from a picture's second line on."""
    made = model.get_decoder().rotary_emb
    rope = dict(model.config.get_text_config().rope_parameters)
    time, height, width = rope["mrope_section"]
    rope["mrope_section"] = [time + 1, height - 1, width]
    if hasattr(made, "mrope_section"):
        made.mrope_section = rope["mrope_section"]
    else:  # older versions read it in attention
        for layer in decoder_layers(model):
            layer.self_attn.config.rope_parameters = rope
    return scene.answer(model, rotary(model), *_first_where(scene, lambda t, h, w: h != t))


@plant("positions in bfloat16", longest=300)
def rounded_positions(scene: Scene, model: Any) -> Answer:
    """Eight bits count to 256; no sample but the longest comes so far."""
    given_keyword(model.get_decoder(), "position_ids", lambda p: p.bfloat16().to(p.dtype))
    sample = max(range(len(scene.samples)), key=lambda s: len(scene.samples[s]))
    return scene.answer(model, rotary(model), sample, 257)


@plant("one picture's pixels off by one level", *QWEN)
def pixels(scene: Scene, model: Any) -> Answer:
    span = scene.pick(scene.spans("image"))
    step = 1 / 255 / 0.27  # a level, after normalisation
    _add_to_pixels(model, span, slice(None), step)
    patch = tower_of(model.model).patch_embed
    return scene.answer(model, [patch, patch.proj], span.sample, span.start)


@plant("one pixel of a picture off by one level", *QWEN)
def one_pixel(scene: Scene, model: Any) -> Answer:
    """In the patches of one merged row: that row is the first."""
    span = scene.pick(scene.spans("image"))
    row = int(scene.rng.integers(span.stop - span.start))
    patch = tower_of(model.model).patch_embed
    _add_to_pixels(model, span, 4 * row + int(scene.rng.integers(4)), 1 / 255 / 0.27, channel=5)
    place = span.sample, span.start + row
    return scene.answer(model, [patch, patch.proj], *place)


@plant("one picture's features in another's place")
def exchanged_features(scene: Scene, model: Any) -> Answer:
    sample = scene.pick(
        [
            s
            for s, x in enumerate(scene.samples)
            if len(x.modality_spans) == 2 and x.media[0].grid_thw == x.media[1].grid_thw
        ]
    )
    one, other = (span for span in scene.spans("image") if span.sample == sample)

    def change(given: Tensor) -> Tensor:
        rows, here, there = given.clone(), scene.rows.of(one), scene.rows.of(other)
        if here and there:
            rows[here], rows[there] = given[there], given[here]
        return rows

    given_keyword(model.get_decoder(), "inputs_embeds", change)
    return scene.answer(model, first_rows(model), one.sample, one.start)


@plant("a picture's last row not merged")
def unmerged(scene: Scene, model: Any) -> Answer:
    """It keeps the placeholder's embedding."""
    span = scene.pick(scene.spans())
    table = model.get_input_embeddings()

    def change(given: Tensor) -> Tensor:
        rows = given.clone()
        if place := scene.rows.of(span):
            about = get_family(scene.family)
            rows[place[0], place[1].stop - 1] = table.weight[about.placeholder_ids[span.modality]]
        return rows

    given_keyword(model.get_decoder(), "inputs_embeds", change)
    return scene.answer(model, first_rows(model), span.sample, span.stop - 1)


@plant("two deepstack levels exchanged", "qwen3_vl")
def deepstack(scene: Scene, model: Any) -> Answer:
    levels = len(model.config.vision_config.deepstack_visual_indexes)
    one, other = sorted(scene.rng.permutation(levels)[:2].tolist())
    return _other_levels(scene, model, one, {one: (other, 1.0), other: (one, 1.0)})


@plant("a deepstack level left out", "qwen3_vl")
def no_deepstack(scene: Scene, model: Any) -> Answer:
    level = int(scene.rng.integers(len(model.config.vision_config.deepstack_visual_indexes)))
    return _other_levels(scene, model, level, {level: (level, 0.0)})


def _other_levels(
    scene: Scene, model: Any, first: int, changes: dict[int, tuple[int, float]]
) -> Answer:
    """Levels of deepstack, each replaced by a share of another; `first`: the lowest."""

    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        given = list(kwargs.get("deepstack_visual_embeds") or ())
        if not given:  # text by itself
            return {}
        moved = {k: share * given[other] for k, (other, share) in changes.items()}
        return {"deepstack_visual_embeds": [moved.get(k, x) for k, x in enumerate(given)]}

    given_keywords(model.get_decoder(), change)
    layer, reader = decoder_layers(model)[first : first + 2]  # added behind the first of these
    return scene.answer(model, [layer, reader, reader.input_layernorm], *scene.first_medium())


@plant("deepstack features not added", "qwen3_vl")
def deepstack_not_added(scene: Scene, model: Any) -> Answer:
    """The next layer reads the very output of the first one, which the other side adds to."""

    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(kwargs.keys() & {"deepstack_visual_embeds", "visual_pos_masks"})

    given_keywords(model.get_decoder(), change)
    norm = [decoder_layers(model)[1].input_layernorm]
    return scene.answer(
        model, norm, *scene.first_medium(), suggests="what runs between these two modules"
    )


@plant("the merger's rows permuted")
def permuted(scene: Scene, model: Any) -> Answer:
    """By one, over all media: each row is its neighbour's."""
    merger = merger_of(model)
    instead(merger, lambda self, own, *a, **k: own(*a, **k).roll(1, -2))
    right = [merger, *first_rows(model)]
    if merger is not tower_of(model.model):
        right.append(tower_of(model.model))
    return scene.answer(model, right, *scene.first_medium())


@plant("height and width of the tower's rotary angles exchanged", *QWEN)
def tower_angles(scene: Scene, model: Any) -> Answer:
    """A patch at a corner has the same number twice, but sees patches that do not."""
    blocks = tower_blocks(model)
    for block in blocks:
        given_keyword(block, "position_embeddings", lambda e: tuple(map(_halves_exchanged, e)))
    right = [blocks[0].attn, blocks[0].attn.proj]
    return scene.answer(model, right, *scene.first_medium())


@plant("windows of half the size in the tower", "qwen2_5_vl")
def tower_windows(scene: Scene, model: Any) -> Answer:
    """A picture wider than such a window is cut otherwise: its rows come in another order, from the third on.

    Bits in the tower's order part in what its rotary table or its first block reads.
    """
    tower = tower_of(model.model)
    tower.window_size //= 2
    first = tower_blocks(model)[0]
    span = next(x for x in scene.spans() if x.medium.grid_thw[2] > 4)
    right = [tower.rotary_pos_emb, first, first.norm1]
    return scene.answer(model, right, span.sample, span.start + 2)


@plant("a tower's block with full attention that has windows", "qwen2_5_vl")
def tower_full(scene: Scene, model: Any) -> Answer:
    tower = tower_of(model.model)
    tower.fullatt_block_indexes = [0, *tower.fullatt_block_indexes]
    tower.config.fullatt_block_indexes = tower.fullatt_block_indexes
    first = tower_blocks(model)[0]
    span = next(x for x in scene.spans() if max(x.medium.grid_thw[1:]) > 8)
    return scene.answer(model, [first.attn, first.attn.proj], span.sample, span.start)


@plant("the last token's hidden of the row before")
def wrong_row(scene: Scene, model: Any) -> Answer:
    """Between the last norm and the head."""
    sample = int(scene.rng.integers(len(scene.samples)))

    def forward(self: Any, own: Any, x: Tensor) -> Tensor:
        out = own(x)
        if sample in scene.rows.starts:
            line, start = scene.rows.starts[sample]
            last = start + len(scene.samples[sample]) - 1
            out[line, last] = out[line, last - 1]
        return out

    decoder = model.get_decoder()
    instead(decoder.norm, forward)
    return scene.answer(
        model, [decoder.norm, decoder, "lm_head"], sample, len(scene.samples[sample]) - 1
    )


@plant("tiles of a picture in another order", "internvl")
def tiles(scene: Scene, model: Any) -> Answer:
    """The first two of the picture that has two or more."""
    span = next(x for x in scene.spans() if x.medium.grid_thw[0] > 1)

    def change(given: Tensor) -> Tensor:
        rows = given.clone()
        if place := scene.rows.of(span):
            line, at = place
            each = (span.stop - span.start) // span.medium.grid_thw[0]
            two = given[line, at.start : at.start + 2 * each]
            rows[line, at.start : at.start + 2 * each] = two.roll(each, 0)
        return rows

    given_keyword(model.get_decoder(), "inputs_embeds", change)
    return scene.answer(model, first_rows(model), span.sample, span.start)


@plant("logprobs over all ids", kept_ids=True, side={"kept_ids": False})
def truncated_support(scene: Scene, model: Any) -> Answer:
    """The sampler kept a few ids for each token; no module differs, the softmax does."""
    return scene.answer(
        model, ["logprobs"], *scene.first_prediction(), suggests="truncated_support"
    )


def _first_where(scene: Scene, rule: Any) -> tuple[int, int]:
    """The first token whose three positions obey the rule."""
    for s, sample in enumerate(scene.samples):
        found = np.flatnonzero(rule(*positions_of(sample)))
        if len(found):
            return s, int(found[0])
    raise AssertionError("no such token in the scene")


def _halves_exchanged(angles: Tensor) -> Tensor:
    """[…, 2 · (height, width)]: width before height, in both halves."""
    quarter = angles.shape[-1] // 4
    return angles.unflatten(-1, (2, 2, quarter)).flip(-2).flatten(-3)


def _add_to_pixels(
    model: Any, span: Span, rows: Any, step: float, channel: Any = slice(None)
) -> None:
    """To a medium's patches, which the tower is given among others; found by what is in them."""
    own = torch.as_tensor(span.medium.pixel_values)

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        starts = (given == own[0].to(given)).all(-1).nonzero().flatten().tolist()
        out = given.clone()
        for start in starts:
            part = out[start : start + len(own)]
            part[rows, channel] = part[rows, channel] + step
        return ((out, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": out})

    tower_of(model.model).register_forward_pre_hook(change, with_kwargs=True)
