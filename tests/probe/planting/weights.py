"""Faults in weights, buffers and numbers that modules hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmpack.adapters.transformers.unwrap import unwrap
from planting.parts import (
    decoder_layers,
    linears,
    rotary,
    text_norms,
    tower_blocks,
    tower_of,
)
from planting.registry import plant
from planting.scene import QWEN, Answer, Scene


@plant("a weight of the tower rounded to bfloat16")
def rounded_weight_of_the_tower(scene: Scene, model: Any) -> Answer:
    product = scene.pick(linears(scene.pick(tower_blocks(model))))
    product.weight.data = product.weight.data.bfloat16().float()
    return scene.answer(model, [product], *scene.first_medium())


@plant("one element of a weight")
def one_element(scene: Scene, model: Any) -> Answer:
    """A hundredth of the weight's largest element, added to one: a bit that flipped on a disk."""
    product = scene.pick(linears(scene.pick(decoder_layers(model))))
    row, column = (int(scene.rng.integers(n)) for n in product.weight.shape)
    product.weight.data[row, column] += product.weight.data.abs().max() / 100
    return scene.answer(model, [product])


@plant("an epsilon ten times as large")
def epsilon(scene: Scene, model: Any) -> Answer:
    norm = scene.pick(text_norms(scene.pick(decoder_layers(model))))
    norm.variance_epsilon *= 10
    return scene.answer(model, [norm])


@plant("an epsilon in the tower")
def epsilon_of_the_tower(scene: Scene, model: Any) -> Answer:
    norms = [
        m
        for block in tower_blocks(model)
        for m in block.modules()
        if hasattr(m, "variance_epsilon") or isinstance(m, torch.nn.LayerNorm)
    ]
    norm = scene.pick(norms)
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, name, getattr(norm, name) * 100)
    return scene.answer(model, [norm], *scene.first_medium())


@plant("a bias dropped", "qwen2_vl", "qwen2_5_vl", "internvl")
def bias(scene: Scene, model: Any) -> Answer:
    biased = [m for m in linears(scene.pick(decoder_layers(model))) if m.bias is not None]
    product = scene.pick(biased)
    product.bias.data.zero_()
    return scene.answer(model, [product])


@plant("norms of query and key exchanged", "qwen3_vl")
def exchanged_norms(scene: Scene, model: Any) -> Answer:
    attention = scene.pick(decoder_layers(model)).self_attn
    q, k = attention.q_norm.weight, attention.k_norm.weight
    q.data, k.data = k.data, q.data
    return scene.answer(model, [attention.q_norm])


@plant("a row of the embedding edited")
def embedding(scene: Scene, model: Any) -> Answer:
    """The head keeps the row that it had."""
    sample = int(scene.rng.integers(len(scene.samples)))
    texts = [t for t in range(len(scene.samples[sample])) if _is_text(scene, sample, t)]
    token = scene.pick(texts)
    table = model.get_input_embeddings()
    untie(model)
    table.weight.data[int(scene.samples[sample].input_ids[token])] *= 1.01
    return scene.answer(model, [table], sample, token)


@plant("a tied head that was not updated")
def untied_head(scene: Scene, model: Any) -> Answer:
    """It holds the embedding as it was before a small step."""
    untie(model)
    generator = torch.Generator().manual_seed(scene.seed)
    head = model.get_output_embeddings().weight.data
    head += 1e-4 * torch.randn(head.shape, generator=generator)
    return scene.answer(model, ["lm_head"], *scene.first_prediction())


@plant("temperature applied twice")
def temperature(scene: Scene, model: Any) -> Answer:
    """A head that divides by the temperature, as one whose caller does that again."""
    untie(model)
    model.get_output_embeddings().weight.data /= 1.1
    return scene.answer(model, ["lm_head"], *scene.first_prediction())


@plant("another rope theta")
def theta(scene: Scene, model: Any) -> Answer:
    """At position 0 no theta turns anything: the second token is the first."""
    made = model.get_decoder().rotary_emb
    made.inv_freq.copy_(made.inv_freq ** float(scene.rng.uniform(1.01, 1.1)))
    return scene.answer(model, rotary(model), 0, 1)


def with_lora(model: Any) -> Any:
    """PEFT around the model, with adapters that do something."""
    peft = pytest.importorskip("peft")
    core = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=r".*layers\.\d+\.self_attn\.[qv]_proj")
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in core.named_parameters():
        if "lora_" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    return core.eval()


@plant("an adapter that one layer lacks", prepare=with_lora)
def missing_adapter(scene: Scene, model: Any) -> Answer:
    """PEFT's, not merged."""
    attention = scene.pick(unwrap(model, "plant").get_decoder().layers).self_attn
    product = scene.pick([attention.q_proj, attention.v_proj])
    product.lora_B["default"].weight.data.zero_()
    whole = unwrap(model, "plant")
    return scene.answer(whole, [product, product.lora_B["default"]])


@plant("GELU by tanh instead of erf, or the other way round", *QWEN)
def gelu(scene: Scene, model: Any) -> Answer:
    """Where the tower or its merger has a GELU."""
    kinds = ("GELU", "GELUTanh", "QuickGELUActivation", "GELUActivation")
    found = [
        (parent, name)
        for parent in tower_of(model.model).modules()
        for name, m in parent.named_children()
        if type(m).__name__ in kinds
    ]
    parent, name = scene.pick(found)
    own = getattr(parent, name)
    exact = type(own).__name__ in ("GELU", "GELUActivation") and (
        getattr(own, "approximate", "none") == "none"
    )
    planted = torch.nn.GELU(approximate="tanh" if exact else "none")
    setattr(parent, name, planted)
    return scene.answer(model, [planted], *scene.first_medium())


@plant("GELU instead of SiLU")
def activation(scene: Scene, model: Any) -> Answer:
    mlp = scene.pick(decoder_layers(model)).mlp
    mlp.act_fn = torch.nn.GELU()
    return scene.answer(model, [mlp.act_fn])


@plant("a row of the table of places in the tower", "qwen3_vl")
def tower_places(scene: Scene, model: Any) -> Answer:
    """The table's first row is the corner of each picture; its features are the first to see it."""
    tower = tower_of(model.model)
    tower.pos_embed.weight.data[0] += 0.01
    # Older transformers read the table for all corners of all patches. These are no rows of the tower, which the probe
    # watches: it finds the first module that gets them.
    older = hasattr(tower, "fast_pos_embed_interpolate")
    first = [tower.pos_embed, tower.blocks[0].norm1] if older else [tower.pos_embed]
    return scene.answer(model, first, *scene.first_medium())


def untie(model: Any) -> None:
    """Give the head a weight of its own, equal to the embedding."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _is_text(scene: Scene, sample: int, token: int) -> bool:
    """Of an id that no other token has, as words of a video's frames are had by several."""
    own = int(scene.samples[sample].input_ids[token])
    times = sum(int((s.input_ids == own).sum()) for s in scene.samples)
    return times == 1 and own < 150_000
