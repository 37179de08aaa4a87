"""Bytes of a pack from a config: what was measured at 7B, budgets that are met to the row, and what is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.planning.memory import Load, largest_pack, memory_model

# config.json of Qwen2.5-VL-7B-Instruct, as released: the decoder's fields at the top
CONFIG_7B = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "in_chans": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
    },
}
HYBRID = CONFIG_7B | {
    "model_type": "qwen3_5",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vision_config": None,
}
# the benchmark's shared pack
LOAD = Load(rows=32_259, loss_tokens=27_459, patches=16_384, keys=65_859)


def test_the_terms_of_a_row():
    """Bytes at 7B by the sizes of its config, in thousands as docs/memory.md says them."""
    width, mlp, heads, head, key_heads = 3584, 18944, 28, 128, 4
    model, per_row = memory_model(CONFIG_7B), Load(rows=1, loss_tokens=0)
    layer = model.layer
    norms, queries, keys = 2 * (4 + 4) * width, 4 * heads * head + 4 * heads, 4 * key_heads * head
    assert layer.input == 2 * width
    assert (layer.kept, layer.key) == (norms + queries + 8 * mlp, keys)
    assert (layer.backward, layer.mlp) == (4 * mlp + 2 * width, 6 * mlp + 6 * width)
    text = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text()
    said = [1000 * int(n) for n in re.findall(r"(\d+) KB", text)]
    found = [layer.input, layer.kept + layer.key, layer.backward, layer.mlp]
    assert said == [round(n, -3) for n in found]
    assert model.peak(per_row, grad=False) == model.rotary + model.held + layer.mlp


def walked(model, load, kept, kept_blocks, selective, train_tower):
    """The most that is held on a walk through tower, decoder, head and back, layer by layer."""
    rows, keys, tower = load.rows, max(load.keys, load.rows), model.tower
    chunks = max(load.chunks, -(-rows // 64))
    layers = [model.linear if i in model.linear_at else model.layer for i in range(model.layers)]
    whole = [layer.activations(rows, keys, chunks, load.branches) for layer in layers]
    stay = [rows * layer.input for layer in layers]
    for i, layer in enumerate(layers):
        if i >= model.layers - kept:
            stay[i] = whole[i]
        elif i >= model.layers - kept - selective:
            stay[i] += layer.outputs(rows, chunks)
    now, peaks, blocks = 0, [], []
    if tower is not None:
        encoded = load.patches // 4
        now += (encoded + tower.copies * max(encoded, load.vision_rows)) * tower.features
        one = tower.block.activations(load.patches, load.patches)
        if train_tower:
            recomputed = tower.blocks - kept_blocks
            blocks = [load.patches * tower.block.input] * recomputed + [one] * kept_blocks
            now += load.patches * (tower.pixels + tower.mergers) + sum(blocks)
        else:
            alone = tower.block.transient(load.patches, load.patches)
            peaks.append(now + alone + load.patches * (tower.pixels + tower.tiles))
    around = rows * (model.rotary + model.held)
    now += around + sum(stay)
    peaks.append(now + rows * (model.final_norm + 2 * model.width) + load.loss_tokens * model.head)
    for i in reversed(range(model.layers)):
        made = whole[i] if i < model.layers - kept else 0
        peaks.append(now + made + layers[i].gradients(rows, chunks))
        now -= stay[i]
    now -= around
    for i in reversed(range(len(blocks))):
        made = one if i < tower.blocks - kept_blocks else 0
        peaks.append(now + made + load.patches * tower.block.backward)
        now -= blocks[i]
    return max(peaks)


def walked_without_gradients(model, load):
    """Tower, then layers one at a time, then the head; nothing stays but what the next one reads."""
    rows, keys, tower = load.rows, max(load.keys, load.rows), model.tower
    chunks, encoded = max(load.chunks, -(-rows // 64)), load.patches // 4
    layers = {model.linear if i in model.linear_at else model.layer for i in range(model.layers)}
    now = 0
    peaks = []
    if tower is not None:
        now = (encoded + tower.copies * max(encoded, load.vision_rows)) * tower.features
        now += load.patches * tower.tiles
        block = tower.block.transient(load.patches, load.patches)
        peaks.append(now + load.patches * tower.pixels + block)
    now += rows * model.rotary + rows * model.held
    peaks += [now + layer.transient(rows, keys, chunks) for layer in layers]
    head = model.final_norm + model.width + model.width  # the rows before it and behind
    return max(*peaks, now + rows * head + load.loss_tokens * model.head_forward)


numbers = st.integers(0, 40_000)


@given(
    st.sampled_from([CONFIG_7B, HYBRID, CONFIG_7B | {"vision_config": None}]),
    st.builds(Load, *[numbers] * 7),
    st.data(),
    st.booleans(),
)
def test_the_peak_is_the_most_on_the_way(config, load, data, train_tower):
    model = memory_model(config)
    blocks = 0 if model.tower is None else model.tower.blocks
    kept, kept_blocks = data.draw(st.integers(0, model.layers)), data.draw(st.integers(0, blocks))
    given = (kept, kept_blocks, data.draw(st.integers(0, model.layers - kept)), train_tower)
    names = ("kept", "kept_blocks", "selective", "train_tower")
    said, found = (
        model.peak(load, **dict(zip(names, given, strict=True))),
        walked(model, load, *given),
    )
    if model.linear_at:  # inputs of layers that are gone are counted as if they were there
        assert found <= said <= found + model.layers * load.rows * model.layer.input
    else:
        assert said == found
    assert model.peak(load, grad=False) == walked_without_gradients(model, load)
    assert Load(load.rows, load.loss_tokens) == Load(load.rows, load.loss_tokens, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shares", [{}, {"loss_share": 0.5, "patches": 0.7, "keys": 2.0}])
def test_the_largest_pack_is_the_largest(grad, shares):
    model, free = memory_model(CONFIG_7B), 30 * 10**9
    most = largest_pack(CONFIG_7B, free, grad=grad, **shares)
    share = {"loss_share": 1.0, "patches": 0.0, "keys": 1.0} | shares

    def peak(rows):
        load = Load(rows, *(int(rows * share[name]) for name in ("loss_share", "patches", "keys")))
        return model.peak(load, grad=grad)

    assert peak(most) <= free < peak(most + 1)


@given(st.integers(0, 28), st.floats(0, 1), st.booleans(), st.sampled_from([CONFIG_7B, HYBRID]))
@example(1, 1.0, False, CONFIG_7B)
def test_selective_layers_meet_the_budget_and_none_more_would(kept, share, less, config):
    """One layer whole, as many as fit by their products, and more whole only where all others are that much.

    Budgets are what some such pack takes, or a byte less.
    """
    model = memory_model(config)
    layers = model.layers
    memory = model.peak(LOAD, kept=kept, selective=int(share * (layers - kept))) - less

    def fits(kept, selective=0):
        return model.peak(LOAD, kept=kept, selective=selective) <= memory

    if not fits(0):
        return
    found = model.kept_layers(LOAD, memory, selective=True)
    if fits(layers):
        assert found == model.kept_layers(LOAD, memory) and found.layers == layers
        return
    some = [k for k in range(layers) if fits(1, k)]
    if not some:
        assert (found.layers, found.selective) == (0, 0)
    elif some[-1] < layers - 1:
        assert (found.layers, found.selective) == (1, some[-1])
    else:
        whole = max(k for k in range(1, layers) if fits(k, layers - k))
        assert (found.layers, found.selective) == (whole, layers - whole)


def test_layers_with_linear_attention_are_those_of_the_config():
    every_fourth = memory_model(HYBRID)
    assert every_fourth.linear_at == tuple(i for i in range(28) if i % 4 != 3)
    named = ["linear_attention"] * 2 + ["full_attention"] * 26
    assert memory_model(HYBRID | {"layer_types": named}).linear_at == (0, 1)
    assert memory_model(CONFIG_7B).linear_at == ()


def test_short_segments_and_branches_take_room():
    """A chunk is of one segment, and a branch keeps the state that it starts from."""
    free = 40 * 10**9
    long = largest_pack(HYBRID, free)
    assert largest_pack(HYBRID, free, chunks=1 / 4) < long
    assert largest_pack(HYBRID, free, branches=1 / 16) < long
    assert largest_pack(HYBRID, free, attention="sdpa") < long
    assert largest_pack(CONFIG_7B, free, chunks=1, branches=1) == largest_pack(CONFIG_7B, free)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (3, "config is of type int"),
        ({"model_type": "llava"}, "of type 'llava'"),
        (CONFIG_7B | {"model_type": "qwen3_5"}, "has no linear_num_key_heads"),
        # two towers, of which one hears; and a tower of another kind above Qwen3.5's decoder
        (
            CONFIG_7B | {"model_type": "qwen2_5_omni_thinker"},
            "the towers of a 'qwen2_5_omni_thinker'",
        ),
        (
            {"model_type": "minicpmv4_6", "text_config": HYBRID, "vision_config": {"depth": 2}},
            "the towers of a 'minicpmv4_6'",
        ),
        (CONFIG_7B | {"num_experts": 8}, "dense"),
        ({"model_type": "qwen2_vl", "hidden_size": 64}, "has no intermediate_size"),
        (CONFIG_7B | {"torch_dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_models_without_terms_are_refused(config, what):
    with pytest.raises(ArgumentError, match=what):
        memory_model(config)
