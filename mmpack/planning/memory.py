"""Bytes that a pack takes beyond weights, gradients and optimizer, from a model's config; how large a pack may be.

Terms are bytes a row of the decoder and bytes a patch of the tower. H and I: width and width of the MLP; A and K: heads
and key heads, times their size; e: bytes of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmpack.errors import ArgumentError, PlanError, check_flag, check_name, check_number
from mmpack.planning.configs import fields_of, required, text_of

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Of the logits in two bytes, what the head's backward holds at once: ops/linear_logprobs/blocks.py.
HEAD_SHARE = 1 / 20.5
HEAD_TILE = 256  # vocabulary entries, each with a maximum and a sum in float32 a loss token
QUERY_ROWS = 1024  # whose mask sdpa holds at a time: ops/attention/sdpa.py
MOST_ROWS = 1 << 26


@dataclass(frozen=True)
class Load:
    """What a pack holds: packed rows, loss tokens, patches; keys that its sequences gather; rows of vision tokens.

    `keys` counts as `rows` at least, `vision_rows` as four patches a row.
    """

    rows: int
    loss_tokens: int
    patches: int = 0
    keys: int = 0
    vision_rows: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("Load", name, value, least=0)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a row (a patch) of one layer."""

    input: int  # all that stays of a layer that is recomputed
    kept: int  # what autograd keeps of its forward, without keys and values
    backward: int  # more than that, where its backward holds most: in the MLP
    mlp: int  # without gradients, where the MLP holds most
    attention: int  # and where attention does, without keys and values
    key: int  # of a key and a value, once
    products: int = 0  # what its matrix products and its attention put out
    quadratic: float = 0.0  # kept, times rows · (rows + QUERY_ROWS): masks of sdpa

    def activations(self, rows: int, keys: int) -> int:
        """What autograd keeps of one layer that is not recomputed."""
        square = self.quadratic * rows * (rows + min(rows, QUERY_ROWS))
        return rows * self.kept + max(keys, rows) * self.key + int(square)

    def transient(self, rows: int, keys: int) -> int:
        """What a layer holds at most without gradients."""
        return max(rows * self.mlp, rows * self.attention + (max(keys, rows) + rows) * self.key)


@dataclass(frozen=True)
class TowerBytes:
    blocks: int
    block: LayerBytes
    pixels: int  # a patch: pixels and positions, for as long as the tower runs
    tiles: int  # a patch: float32 pixels put into tiles, gone before the backward
    mergers: int  # a patch: what the mergers keep; this too until the tower's own backward
    features: int  # a row of vision tokens: what the decoder gets, all levels
    copies: int  # of features, as the decoder's loop holds them


class Kept(NamedTuple):
    """Layers that are not recomputed, or not in full: the last `layers` of the decoder and the last `blocks` of the
    tower are kept; the `selective` decoder layers before them keep the outputs of their products and attention."""

    layers: int
    blocks: int = 0
    selective: int = 0


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that passes of a model take, as transformers runs it (eager norms, rotary and SwiGLU) and mmpack its
    attention and head. Liger's kernels and torch.compile keep less: there it is a bound from above, as it is where
    weights are frozen (LoRA).

    RMSNorm in half precision keeps a float32 copy, the normalised rows and, for the matrices after it, its output:
    (4 + 2e)·H; in float32 the copy is the input itself. Rotary keeps nothing. Attention keeps queries, output, a
    float32 sum a head and the keys and values that it reads, gathered or not; SwiGLU its four rows of I. So a layer
    keeps 2·(4 + 2e)·H + 2e·A + 2e·K + 4e·I, with norms of queries and keys (4 + e)·(A + K) more. Its backward holds
    most behind the product of SwiGLU: three gradients of I while one of its rows is gone, 2e·I + e·H.
    Source: modeling_qwen2_5_vl.py and its like in transformers, line by line. Checked against counted bytes in
    tests/adapters/test_counted_memory.py and on a GPU in test_memory_gpu.py.
    """

    layers: int
    layer: LayerBytes
    width: int  # e·H
    held: int  # a row: what the loop over layers holds beside a layer's input
    rotary: int  # a row: cosines and sines, positions
    final_norm: int
    head: int  # a loss token, with gradients
    head_forward: int  # and without
    tower: TowerBytes | None

    def peak(
        self,
        load: Load,
        *,
        grad: bool = True,
        kept: int = 0,
        kept_blocks: int = 0,
        selective: int = 0,
        train_tower: bool = True,
    ) -> int:
        """Bytes at the largest moment of `packed_logprobs`, and of its backward.

        Args: `kept`: decoder layers that are not recomputed, the last ones; 0 is full gradient checkpointing, `layers`
        is none. `kept_blocks`: the same of the tower. `selective`: layers before them that keep the outputs of their
        products and attention, and recompute the rest. `train_tower`: whether the tower has gradients. `grad=False`:
        no activations are held, and the others say nothing.

        The last layers are gone before the first recomputation begins: one kept layer costs nothing, it lies where
        a layer would be recomputed.
        """
        self._check_kept(kept, kept_blocks, selective)
        rows, keys = load.rows, max(load.keys, load.rows)
        around = rows * (self.rotary + self.held)
        if not grad:
            head = rows * (self.final_norm + 2 * self.width) + load.loss_tokens * self.head_forward
            most = around + max(self.layer.transient(rows, keys), head)
            return max(most + self._features(load) + self._tiles(load), self._tower_alone(load))
        inputs = (self.layers - kept) * rows * self.layer.input
        inputs += selective * rows * self.layer.products
        layer = self.layer.activations(rows, keys)
        norm = rows * self.final_norm
        head = inputs + kept * layer + norm + 2 * rows * self.width + load.loss_tokens * self.head
        backward = inputs + max(kept, 1) * layer + rows * self.layer.backward
        most = around + max(head, backward) + self._features(load)
        if self.tower is None or not train_tower:
            return max(most, self._tower_alone(load))
        held = load.patches * (self.tower.pixels + self.tower.mergers)
        held += (self.tower.blocks - kept_blocks) * load.patches * self.tower.block.input
        block = self.tower.block.activations(load.patches, load.patches)
        alone = max(kept_blocks, 1) * block + load.patches * self.tower.block.backward
        return max(most + held + kept_blocks * block, held + alone + self._features(load))

    def kept_layers(
        self, load: Load, memory: int, train_tower: bool = True, selective: bool = False
    ) -> Kept:
        """How many of the last decoder layers, and of the last tower blocks, need no recomputation in `memory` bytes.

        Decoder layers first: a byte held there saves about three times the products that it saves in a tower. With
        `selective` one layer is kept, which is free; then layers keep their products' outputs, which is all of the
        matrix products for half of the bytes; what remains keeps layers whole.
        Raises PlanError if the pack does not fit with everything recomputed.
        """
        blocks = self.tower.blocks if self.tower is not None and train_tower else 0

        def fits(kept: int, kept_blocks: int = 0, selective: int = 0) -> bool:
            found = self.peak(
                load,
                kept=kept,
                kept_blocks=kept_blocks,
                selective=selective,
                train_tower=train_tower,
            )
            return found <= memory

        if not fits(0):
            raise PlanError(
                f"memory: {load.rows} rows take {self.peak(load, train_tower=train_tower):,} bytes with every layer "
                f"recomputed, there are {memory:,}. Fix: plan smaller packs (largest_pack says how large)"
            )
        kept = _largest(self.layers, fits)
        if kept == self.layers:
            return Kept(kept, _largest(blocks, lambda k: fits(kept, k)))
        if not selective or not kept:
            return Kept(kept)
        some = _largest(self.layers - 1, lambda k: fits(1, 0, k))
        if some < self.layers - 1:
            return Kept(1, 0, some)
        kept = _largest(self.layers, lambda k: fits(max(k, 1), 0, self.layers - max(k, 1)))
        return Kept(max(kept, 1), 0, self.layers - max(kept, 1))

    def _features(self, load: Load) -> int:
        """As encoded, four patches a row, and as repeated for each run of placeholders."""
        if self.tower is None:
            return 0
        encoded = load.patches // 4
        return (encoded + max(load.vision_rows, encoded) * self.tower.copies) * self.tower.features

    def _tower_alone(self, load: Load) -> int:
        """Without gradients, before the decoder begins."""
        if self.tower is None:
            return 0
        block = self.tower.block.transient(load.patches, load.patches)
        around = load.patches * self.tower.pixels + self._features(load) + self._tiles(load)
        return block + around

    def _tiles(self, load: Load) -> int:
        """Held by the whole forward before transformers 5.19."""
        return 0 if self.tower is None else load.patches * self.tower.tiles

    def _check_kept(self, kept: int, kept_blocks: int, selective: int) -> None:
        blocks = 0 if self.tower is None else self.tower.blocks
        check_number("memory", "kept", kept, least=0, most=self.layers)
        check_number("memory", "kept_blocks", kept_blocks, least=0, most=blocks)
        check_number("memory", "selective", selective, least=0, most=self.layers - kept)


def memory_model(
    config: Any, dtype: str | None = None, attention: str = "sequences"
) -> MemoryModel:
    """The terms of a dense Qwen2-VL, Qwen2.5-VL, Qwen3-VL or InternVL.

    Args: `config`: of transformers, or the dict of its config.json. `dtype`: of the activations; the config's if not
    given, else bfloat16. `attention`: "sequences" (varlen, FlashAttention), or "sdpa" as on a CPU, which repeats
    key heads and keeps masks. Raises ArgumentError for other models.
    """
    fields = fields_of(config, "memory_model")
    check_name("memory_model", "attention", attention, ("sequences", "sdpa"))
    name = dtype or str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    check_name("memory_model", "dtype", name, DTYPES)
    e, text = DTYPES[name], _text(fields)
    width, vocab = text["hidden_size"], text["vocab_size"]
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or width // heads
    key_width = (text.get("num_key_value_heads") or heads) * head_dim
    normed = str(text.get("model_type", "")).startswith("qwen3")
    tower = _tower(fields, e, width, attention)
    return MemoryModel(
        layers=text["num_hidden_layers"],
        layer=_decoder_layer(
            e, width, text["intermediate_size"], heads, head_dim, key_width, normed, attention
        ),
        width=e * width,
        # deepstack makes one more copy of the hidden states
        held=e * width * (2 if tower is not None and tower.copies > 1 else 1),
        rotary=2 * e * head_dim + 6 * 8,  # position ids, ids, the rule's array
        final_norm=(4 + e) * width,
        head=int(2 * vocab * HEAD_SHARE) + e * width,
        head_forward=8 * -(-vocab // HEAD_TILE) + e * width,
        tower=tower,
    )


def largest_pack(
    config: Any,
    free_bytes: int,
    loss_share: float = 1.0,
    patches: float = 0.0,
    keys: float = 1.0,
    vision: float = 0.0,
    *,
    grad: bool = True,
    kept: int = 0,
    train_tower: bool = True,
    dtype: str | None = None,
    attention: str = "sequences",
) -> int:
    """max_tokens: the most packed rows that `free_bytes` take, what weights, gradients and optimizer leave free.

    Args: `grad`: with activations and a backward (gradient checkpointing but for the last `kept` layers), or without,
    as old and reference logprobs run. `loss_share`, `patches`, `keys`, `vision`: loss tokens, patches, gathered keys
    and vision tokens a row. The others: see `memory_model` and `MemoryModel.peak`.

    Returns 0 if not even a row fits. Raises ArgumentError.

    Example: a decoder of two layers; without gradients only one layer's inside exists.
        >>> from mmpack.planning.memory import largest_pack
        >>> text = {"model_type": "qwen2_5_vl", "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
        >>> text |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000}
        >>> largest_pack(text, 10**7) < largest_pack(text, 10**7, grad=False)
        True
    """
    check_number("largest_pack", "free_bytes", free_bytes, least=0)
    check_flag("largest_pack", "grad", grad)
    shares = {"loss_share": loss_share, "patches": patches, "keys": keys, "vision": vision}
    for name, value in shares.items():
        check_number("largest_pack", name, value, least=0)
    model = memory_model(config, dtype, attention)

    def fits(rows: int) -> bool:
        load = Load(rows, *(int(rows * share) for share in shares.values()))
        return model.peak(load, grad=grad, kept=kept, train_tower=train_tower) <= free_bytes

    return _largest(MOST_ROWS, fits)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 0 … most that fits, by halving: what a smaller one takes is less. 0 is taken to fit."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's fields, of a kind whose layers are known here."""
    text = text_of(fields)
    kind = str(text.get("model_type") or fields.get("model_type") or "")
    known = kind.startswith(("qwen2", "qwen3", "internvl"))
    # the dict of a config that transformers 5.23 made names them otherwise than released files do
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not known or kind.startswith("qwen3_5") or "_moe" in kind or experts:
        raise ArgumentError(
            f"memory_model: no terms for a decoder of type {kind!r:.60}. "
            "Fix: a dense Qwen2-VL, Qwen2.5-VL, Qwen3-VL or InternVL; else measure a pack and pass max_tokens"
        )
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    required(text, (*names, "num_hidden_layers", "vocab_size"), "memory_model")
    return text


def _decoder_layer(
    e: int,
    width: int,
    inner: int,
    heads: int,
    head_dim: int,
    key_width: int,
    normed: bool,
    attention: str,
) -> LayerBytes:
    across = heads * head_dim
    norms = 2 * (4 + 2 * e) * width
    if normed:
        norms += (4 + e) * (across + key_width)
    kept = norms + 2 * e * across + 4 * heads + 4 * e * inner
    key, quadratic = 2 * e * key_width, 0.0
    if attention == "sdpa":
        kept += e * across  # pieces of the output, and their copy
        key, quadratic = 2 * e * across, e / 2
    return LayerBytes(
        input=e * width,
        kept=kept,
        backward=2 * e * inner + e * width,
        # the layer's input is held by the loop over layers
        mlp=3 * e * inner + 3 * e * width,
        attention=2 * e * width + 2 * e * across,
        key=key,
        products=2 * e * (across + key_width + width + inner) + 4 * heads,
        quadratic=quadratic,
    )


def _tower(fields: Mapping[str, Any], e: int, out_width: int, attention: str) -> TowerBytes | None:
    """A block of the tower keeps its two norms, queries, keys, values, output and the inside of its MLP.

    LayerNorm keeps input and output. Values are a part of the joint product of Qwen's, and hold the whole of it under
    sdpa. InternVL scales what each half adds, and keeps it.
    """
    tower = fields.get("vision_config")
    if not tower:
        return None
    kind = str(fields.get("model_type") or "")
    old = kind.startswith("qwen2_vl")
    width = tower.get("embed_dim", 1280) if old else tower["hidden_size"]
    inner = int(width * tower.get("mlp_ratio", 4)) if old else tower["intermediate_size"]
    blocks = tower.get("depth") or tower.get("num_hidden_layers")
    heads = tower.get("num_heads") or tower.get("num_attention_heads") or 16
    internvl, windowed = kind.startswith("internvl"), kind.startswith("qwen2_5")
    rms, layer_norm = (4 + 2 * e) * width, 2 * e * width + 8
    norm = rms if windowed else layer_norm
    rows = 4 * e * width  # queries, keys, values, output
    if attention == "sdpa":
        rows += e * width + (0 if internvl else 2 * e * width)
    if internvl:
        rows += 2 * e * width
        rows += 2 * (4 + 2 * e) * width if tower.get("use_qk_norm") else 0
    # rows of I that the MLP keeps, and that its backward holds beyond them: SwiGLU; quick GELU; GELU
    mlp, more = (4, 2) if windowed else (3, 2) if old else (2, 1)
    levels = len(tower.get("deepstack_visual_indexes") or ()) if kind.startswith("qwen3") else 0
    patch, channels = tower.get("patch_size", 14), tower.get("in_channels", 3)
    size = patch[0] * patch[1] if isinstance(patch, (list, tuple)) else patch * patch
    # float32 pixels are the batch's own
    frames = 1 if internvl else tower.get("temporal_patch_size", 2)
    pixels = (e if e < 4 else 0) * channels * size * frames
    merger = norm + 2 * e * width
    return TowerBytes(
        blocks=blocks,
        block=LayerBytes(
            input=e * width,
            kept=2 * norm + rows + 4 * heads + mlp * e * inner,
            backward=more * e * inner + e * width,
            mlp=(3 if mlp > 2 else 2) * e * inner + 3 * e * width,
            # rotary runs in float32
            attention=6 * e * width + (0 if internvl else 28 * width),
            key=0,
        ),
        pixels=pixels + 8 * (width // heads),
        tiles=4 * channels * size if internvl else 0,
        mergers=(1 + levels) * merger,
        features=(1 + levels) * e * out_width,
        copies=2 if levels else 1,
    )
