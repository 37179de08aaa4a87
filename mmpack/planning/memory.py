"""Bytes that a pack takes beyond weights, gradients and optimizer, from a model's config; how large a pack may be.

Terms are bytes a row of the decoder and bytes a patch of the tower. H and I: width and width of the MLP; A and K: heads
and key heads, times their size; e: bytes of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmpack.errors import ArgumentError, PlanError, check_flag, check_name, check_number
from mmpack.families.kinds import DecoderKind, decoder_kind, tower_kind
from mmpack.planning.configs import Fields, fields_of, required, text_of
from mmpack.planning.layer_bytes import (
    Decoder,
    LayerBytes,
    Net,
    TowerBytes,
    chunks_of,
    linear_layer,
    softmax_layer,
    tower_bytes,
)

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Of the logits in two bytes, what the head's backward holds at once: ops/logprobs/linear/blocks.py.
HEAD_SHARE = 1 / 20.5
HEAD_TILE = 256  # vocabulary entries, each with a maximum and a sum in float32 a loss token
MOST_ROWS = 1 << 26


@dataclass(frozen=True)
class Load:
    """What a pack holds: packed rows, loss tokens, patches; keys that its sequences gather; rows of vision tokens;
    chunks of 64 rows, each of one segment, and segments that start from another's state, of linear attention.

    `keys` counts as `rows` at least, `vision_rows` as four patches a row, `chunks` as full ones.
    """

    rows: int
    loss_tokens: int
    patches: int = 0
    keys: int = 0
    vision_rows: int = 0
    chunks: int = 0
    branches: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("Load", name, value, least=0)


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
    tests/adapters/test_counted_memory.py, and on a GPU, but for linear attention, in test_memory_gpu.py.
    """

    layers: int
    layer: LayerBytes  # with softmax attention
    width: int  # e·H
    held: int  # a row: what the loop over layers holds in addition to a layer's input
    rotary: int  # a row: cosines and sines, positions
    final_norm: int
    head: int  # a loss token, with gradients
    head_forward: int  # and without
    tower: TowerBytes | None
    linear: LayerBytes | None = None  # with linear attention
    linear_at: tuple[int, ...] = ()  # which layers those are

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
        chunks = _chunks(load)
        around = rows * (self.rotary + self.held)
        if not grad:
            head = rows * (self.final_norm + 2 * self.width) + load.loss_tokens * self.head_forward
            inside = max(layer.transient(rows, keys, chunks) for layer in set(self._by_layer()))
            most = around + max(inside, head)
            return max(most + self._features(load) + self._tiles(load), self._tower_alone(load))
        inputs = (self.layers - kept) * rows * self.layer.input
        by_layer = self._by_layer()
        first = self.layers - kept
        some = by_layer[first - selective : first]
        inputs += sum(layer.outputs(rows, chunks) for layer in some)
        whole, largest = self._backward(load, kept)
        norm = rows * self.final_norm
        head = inputs + whole + norm + 2 * rows * self.width + load.loss_tokens * self.head
        most = around + max(head, inputs + largest) + self._features(load)
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
                f"recomputed, but there are {memory:,}. Fix: plan smaller packs (largest_pack says how large)"
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

    def _by_layer(self) -> list[LayerBytes]:
        kinds = (self.layer, self.linear or self.layer)
        return [kinds[i in self.linear_at] for i in range(self.layers)]

    def _backward(self, load: Load, kept: int) -> tuple[int, int]:
        """What the kept layers hold; and the most that the backward does, layer by layer from the last one."""
        rows, keys, chunks = load.rows, max(load.keys, load.rows), _chunks(load)
        by_layer = self._by_layer()
        held = {
            layer: layer.activations(rows, keys, chunks, load.branches) for layer in set(by_layer)
        }
        whole = left = sum(held[layer] for layer in by_layer[self.layers - kept :])
        most = 0
        for i, layer in reversed(list(enumerate(by_layer))):
            last = i >= self.layers - kept
            inside = left if last else held[layer]
            most = max(most, inside + layer.gradients(rows, chunks))
            left -= held[layer] if last else 0
        return whole, most

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
    config: Any, dtype: str | None = None, attention: str = "sequences", rule: str | None = None
) -> MemoryModel:
    """The terms of a dense Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 or InternVL.

    Args: `config`: of transformers, or the dict of its config.json. `dtype`: of the activations; the config's if not
    given, else bfloat16. `attention`: "sequences" (varlen, FlashAttention), or "sdpa" as on a CPU, which repeats
    key heads and keeps masks. `rule`, of linear attention: "fla" or "torch"; by default "torch" with "sdpa".
    Raises ArgumentError for other models.
    """
    fields = fields_of(config, "memory_model")
    check_name("memory_model", "attention", attention, ("sequences", "sdpa"))
    rule = rule or ("torch" if attention == "sdpa" else "fla")
    check_name("memory_model", "rule", rule, ("torch", "fla"))
    name = dtype or str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    check_name("memory_model", "dtype", name, DTYPES)
    e, text = DTYPES[name], _text(fields)
    width, vocab = text["hidden_size"], text["vocab_size"]
    size, linear_at = _decoder(text, e), _linear_at(text)
    tower = tower_bytes(fields, e, width, attention)
    return MemoryModel(
        layers=text["num_hidden_layers"],
        layer=softmax_layer(size, attention),
        width=e * width,
        # deepstack makes one more copy of the hidden states
        held=e * width * (2 if tower is not None and tower.copies > 1 else 1),
        rotary=2 * e * size.head_dim + 6 * 8,  # position ids, ids, the rule's array
        final_norm=size.norm - e * width,
        head=int(2 * vocab * HEAD_SHARE) + e * width,
        head_forward=8 * -(-vocab // HEAD_TILE) + e * width,
        tower=tower,
        linear=linear_layer(size, _net(text), rule) if linear_at else None,
        linear_at=linear_at,
    )


def largest_pack(
    config: Any,
    free_bytes: int,
    loss_share: float = 1.0,
    patches: float = 0.0,
    keys: float = 1.0,
    vision: float = 0.0,
    chunks: float = 0.0,
    branches: float = 0.0,
    *,
    grad: bool = True,
    kept: int = 0,
    train_tower: bool = True,
    dtype: str | None = None,
    attention: str = "sequences",
) -> int:
    """max_tokens: the most packed rows that `free_bytes` take, what weights, gradients and optimizer leave free.

    Args: `grad`: with activations and a backward (gradient checkpointing but for the last `kept` layers), or without,
    as old and reference logprobs run. `loss_share`, `patches`, `keys`, `vision`, `chunks`, `branches`: loss tokens,
    patches, gathered keys, vision tokens, and a `Load`'s chunks and branches, a row. The others: see `memory_model`
    and `MemoryModel.peak`.

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
    shares |= {"chunks": chunks, "branches": branches}
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


def _text(fields: Fields) -> Fields:
    """The decoder's fields, of a kind whose layers are known here."""
    text = text_of(fields)
    kind = str(text.get("model_type") or fields.get("model_type") or "")
    # the dict of a config that transformers 5.23 made names them otherwise than released files do
    experts = text.get("num_experts") or text.get("num_local_experts")
    if decoder_kind(kind) is None or "_moe" in kind or experts:
        raise ArgumentError(
            f"memory_model: it has no terms for a decoder of type {kind!r:.60}. "
            "Fix: use a dense Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 or InternVL; for others measure a pack "
            "and pass max_tokens"
        )
    whole = str(fields.get("model_type") or "")
    if fields.get("vision_config") and not tower_kind(whole).in_memory:
        raise ArgumentError(
            f"memory_model: it has no terms for the towers of a {whole!r:.60}. Fix: measure a pack and pass max_tokens"
        )
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    required(text, (*names, "num_hidden_layers", "vocab_size"), "memory_model")
    return text


def _decoder(text: Mapping[str, Any], e: int) -> Decoder:
    heads, kind = text["num_attention_heads"], _kind(text)
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return Decoder(
        e=e,
        width=text["hidden_size"],
        inner=text["intermediate_size"],
        heads=heads,
        head_dim=head_dim,
        key_width=(text.get("num_key_value_heads") or heads) * head_dim,
        normed=kind.normed,
        gated=kind.gated,
    )


def _linear_at(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with linear attention: as `layer_types` says, or by the interval that released files may have."""
    if not _kind(text).gated:
        return ()
    kinds, every = text.get("layer_types"), text.get("full_attention_interval") or 4
    if kinds:
        return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    return tuple(i for i in range(text["num_hidden_layers"]) if (i + 1) % every)


def _kind(text: Mapping[str, Any]) -> DecoderKind:
    return decoder_kind(str(text.get("model_type", ""))) or DecoderKind()


def _net(text: Mapping[str, Any]) -> Net:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    required(text, tuple(f"linear_{name}" for name in names), "memory_model")
    return Net(*(text[f"linear_{name}"] for name in names))


def _chunks(load: Load) -> int:
    return max(load.chunks, int(chunks_of(load.rows)))
