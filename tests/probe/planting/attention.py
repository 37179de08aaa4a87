"""Faults in attention: masks, scales, heads, what is added up around it."""

from __future__ import annotations

from typing import Any

import torch

from planting.parts import (
    after,
    attend_rows,
    attended,
    decoder_layers,
    instead,
    meddle,
    tower_blocks,
)
from planting.registry import plant
from planting.scene import QWEN, Answer, Scene

Tensor = torch.Tensor


@plant("attention's scale off")
def scale(scene: Scene, model: Any) -> Answer:
    """A row that sees only itself can't tell: the second token is the first."""
    layer = scene.pick(decoder_layers(model))
    layer.self_attn.scaling *= 1.02
    return scene.answer(model, attended(layer), 0, 1)


@plant("attention's scale off in the tower", *QWEN)
def tower_scale(scene: Scene, model: Any) -> Answer:
    block = scene.pick(tower_blocks(model))
    block.attn.scaling *= 1.02
    return scene.answer(model, [block.attn, block.attn.proj], *scene.first_medium())


@plant("query heads that read the wrong key head")
def wrong_groups(scene: Scene, model: Any) -> Answer:
    """Key heads tiled, where they must be repeated one by one."""
    layer = scene.pick(decoder_layers(model))

    def fault(module: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, groups = q.shape[1], q.shape[1] // k.shape[1]
        order = torch.arange(heads).view(groups, -1).T.flatten()  # query heads of key head 0, 1, …
        out = attend(q[:, order], k, v)
        return out[:, :, order.argsort()]

    meddle(layer.self_attn, fault)
    return scene.answer(model, attended(layer))


@plant("a picture whose tokens see each other both ways")
def image_mask(scene: Scene, model: Any) -> Answer:
    """In all layers, as a mask is; the other order of the sides is a mask that is missing."""
    span = scene.pick(scene.spans("image"))

    def fault(module: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        place = scene.rows.of(span)
        if place is None:
            return out
        line, rows = place
        keys = slice(rows.start - span.start, rows.stop)
        seen = torch.ones(span.stop - span.start, span.stop, dtype=torch.bool)
        out = out.clone()
        out[line, rows] = attend_rows(module, q, k, v, line, rows, keys, seen)
        return out

    layers = decoder_layers(model)
    for layer in layers:
        meddle(layer.self_attn, fault)
    return scene.answer(model, attended(layers[0]), span.sample, span.start)


@plant("state that leaks between packed samples", layouts=("packed",))
def leak(scene: Scene, model: Any) -> Answer:
    """A sample's rows see the last three of the one before it."""
    layer = scene.pick(decoder_layers(model))
    sample = int(scene.rng.integers(1, len(scene.samples)))
    length = len(scene.samples[sample])

    def fault(module: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v).clone()
        line, start = scene.rows.starts[sample]
        seen = torch.ones(length, length + 3, dtype=torch.bool).tril(3)
        rows, keys = slice(start, start + length), slice(start - 3, start + length)
        out[line, rows] = attend_rows(module, q, k, v, line, rows, keys, seen)
        return out

    meddle(layer.self_attn, fault)
    return scene.answer(model, attended(layer), sample, 0)


@plant("a truncated sliding window")
def window(scene: Scene, model: Any) -> Answer:
    layer = scene.pick(decoder_layers(model))
    size = int(scene.rng.integers(8, 16))

    def fault(module: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v).clone()
        for _, line, start, length in scene.rows.here():
            if length > size:
                rows, keys = slice(start + size, start + length), slice(start, start + length)
                seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - size)[size:]
                out[line, rows] = attend_rows(module, q, k, v, line, rows, keys, seen)
        return out

    meddle(layer.self_attn, fault)
    sample = next(s for s, x in enumerate(scene.samples) if len(x) > size)
    return scene.answer(model, attended(layer), sample, size)


@plant("a softcap on attention's scores")
def softcap(scene: Scene, model: Any) -> Answer:
    layer = scene.pick(decoder_layers(model))
    cap = 5.0

    def fault(module: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v).clone()
        groups = q.shape[1] // k.shape[1]
        for _, line, start, length in scene.rows.here():
            rows = slice(start, start + length)
            own_k, own_v = (x[line, :, rows].repeat_interleave(groups, 0) for x in (k, v))
            scores = cap * torch.tanh(q[line, :, rows] @ own_k.mT * module.scaling / cap)
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            capped = (weights @ own_v).transpose(0, 1)
            out[line, start + 1 : start + length] = capped[1:]  # the first sees only itself
        return out

    meddle(layer.self_attn, fault)
    return scene.answer(model, attended(layer), 0, 1)


@plant("a residual left out")
def no_residual(scene: Scene, model: Any) -> Answer:
    """Around the MLP: the layer's output, which the next one reads."""
    layer = scene.pick(decoder_layers(model))

    def forward(self: Any, own: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden = hidden_states + self.self_attn(hidden_states=normed, **kwargs)[0]
        return self.mlp(self.post_attention_layernorm(hidden))

    instead(layer, forward)
    return scene.answer(model, after(layer, model))


@plant("the last norm left out")
def last_norm(scene: Scene, model: Any) -> Answer:
    norm = model.get_decoder().norm
    instead(norm, lambda self, own, x: x)
    return scene.answer(model, [norm])


@plant("dropout left on in a layer")
def dropout(scene: Scene, model: Any) -> Answer:
    """After the MLP, before it is added."""
    layer = scene.pick(decoder_layers(model))
    seed = scene.seed

    def forward(self: Any, own: Any, x: Tensor) -> Tensor:
        out = own(x)
        kept = torch.rand(out.shape, generator=torch.Generator().manual_seed(seed)) >= 0.1
        return out * kept / 0.9

    instead(layer.mlp, forward)
    return scene.answer(model, [layer.mlp, *after(layer, model)])


@plant("a clip of the MLP, as of float16's overflow")
def clip(scene: Scene, model: Any) -> Answer:
    """What enters the last product is cut at a limit that few values pass: which, a plain run of the model says."""
    layer = scene.pick(decoder_layers(model))
    seen: list[Tensor] = []
    handle = layer.mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    run(scene, model)
    handle.remove()
    peaks = [seen[0][line, a : a + n].abs().amax(-1) for _, line, a, n in scene.rows.here()]
    limit = 0.9 * float(torch.cat(peaks).max())
    sample, token = next(
        (s, int((p > limit).nonzero()[0])) for s, p in enumerate(peaks) if (p > limit).any()
    )

    def forward(self: Any, own: Any, x: Tensor) -> Tensor:
        gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated.clamp(-limit, limit))

    instead(layer.mlp, forward)
    return scene.answer(model, [layer.mlp, layer.mlp.down_proj], sample, token)


def run(scene: Scene, model: Any) -> None:
    """One forward of the scene's samples, packed."""
    import mmpack as mp
    from mmpack.adapters.transformers import attach, model_inputs

    with torch.no_grad(), attach(model):
        model(**model_inputs(mp.pack(scene.samples), model))
