"""Bytes a row of a decoder layer, and a patch of a tower's block, takes: what autograd keeps, what passes hold at most.

Terms as in memory.py. The delta rule works on chunks of CHUNK rows, of one segment each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmpack.families.kinds import tower_kind

QUERY_ROWS = 1024  # whose mask sdpa holds at a time: ops/attention/sdpa.py
# rows of I that a tower's MLP keeps, and that its backward holds beyond them
_MLP_ROWS = {"swiglu": (4, 2), "quick_gelu": (3, 2), "gelu": (2, 1)}
CHUNK = 64  # rows: ops/linear_attention/chunk_plan.py


def chunks_of(rows: Any) -> Any:
    """Chunks that a segment of so many rows takes; a number, or an array of them."""
    return -(-rows // CHUNK)


@dataclass(frozen=True)
class RuleBytes:
    """Bytes of the delta rule of a layer with linear attention."""

    backward: int  # a row, more than what is kept, where the rule's backward runs; less than 0 where an MLP is wide
    chunk: int  # kept a chunk
    chunk_backward: int
    chunk_forward: int  # without gradients
    chunk_products: int
    branch: int  # kept a branch: the state that it starts from


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
    rule: RuleBytes | None = None  # of linear attention

    def activations(self, rows: int, keys: int, chunks: int = 0, branches: int = 0) -> int:
        """What autograd keeps of one layer that is not recomputed."""
        square = self.quadratic * rows * (rows + min(rows, QUERY_ROWS))
        kept = rows * self.kept + max(keys, rows) * self.key + int(square)
        if self.rule is not None:
            kept += chunks * self.rule.chunk + branches * self.rule.branch
        return kept

    def gradients(self, rows: int, chunks: int = 0) -> int:
        """What its backward holds beyond that, at most."""
        most = rows * self.backward
        if self.rule is not None:
            most = max(most, rows * self.rule.backward + chunks * self.rule.chunk_backward)
        return most

    def outputs(self, rows: int, chunks: int = 0) -> int:
        """What a layer holds that keeps the outputs of its products alone."""
        some = 0 if self.rule is None else chunks * self.rule.chunk_products
        return rows * self.products + some

    def transient(self, rows: int, keys: int, chunks: int = 0) -> int:
        """What a layer holds at most without gradients."""
        mixer = rows * self.attention
        if self.rule is None:
            mixer += (max(keys, rows) + rows) * self.key
        else:
            mixer += chunks * self.rule.chunk_forward
        return max(rows * self.mlp, mixer)


@dataclass(frozen=True)
class TowerBytes:
    blocks: int
    block: LayerBytes
    pixels: int  # a patch: pixels and positions, for as long as the tower runs
    tiles: int  # a patch: float32 pixels put into tiles, gone before the backward
    mergers: int  # a patch: what the mergers keep; this too until the tower's own backward
    features: int  # a row of vision tokens: what the decoder gets, all levels
    copies: int  # of features, as the decoder's loop holds them


class Decoder(NamedTuple):
    """Sizes of a decoder's layers. `gated`: attention's output is gated, and norms keep float32 (Qwen3.5)."""

    e: int
    width: int
    inner: int
    heads: int
    head_dim: int
    key_width: int
    normed: bool  # queries and keys
    gated: bool

    @property
    def norm(self) -> int:
        """What an RMSNorm keeps: its input and the normalised rows, in float32 or not, and its output."""
        return (8 + self.e if self.gated else 4 + 2 * self.e) * self.width

    @property
    def mlp(self) -> tuple[int, int, int]:
        """SwiGLU: what it keeps, what its backward holds beyond that, and what it holds without gradients."""
        e, rows = self.e, self.e * self.inner
        return 4 * rows, 2 * rows + e * self.width, 3 * rows + 3 * e * self.width


class Net(NamedTuple):
    """A gated delta net: heads of keys and of values, and their sizes."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def softmax_layer(size: Decoder, attention: str) -> LayerBytes:
    """A layer with softmax attention; `attention`: "sequences" or "sdpa"."""
    e, width = size.e, size.width
    across = size.heads * size.head_dim
    kept, backward, mlp = size.mlp
    kept += 2 * size.norm + 2 * e * across + 4 * size.heads
    products = 2 * e * (across + size.key_width + width + size.inner) + 4 * size.heads
    if size.normed:
        kept += (8 if size.gated else 4 + e) * (across + size.key_width)
    if size.gated:
        kept += 2 * e * across  # the gate, and what it leaves
        kept += e * across if e == 4 else 0  # in addition to the queries, which their norm keeps
        products += e * across
    key, quadratic = 2 * e * size.key_width, 0.0
    if attention == "sdpa":
        kept += e * across  # pieces of the output, and their copy
        key, quadratic = 2 * e * across, e / 2
    return LayerBytes(
        input=e * width,
        kept=kept,
        backward=backward,
        # the layer's input is held by the loop over layers
        mlp=mlp,
        attention=2 * e * width + (4 if size.gated else 2) * e * across,
        key=key,
        products=products,
        quadratic=quadratic,
    )


def linear_layer(size: Decoder, net: Net, rule: str) -> LayerBytes:
    """A layer with a gated delta net; `rule`: "torch", our chunks in float32, or "fla", flash-linear-attention's.

    The net keeps the convolution's input, and five rows of values around the norm before its output. The torch rule
    keeps six squares of a chunk a head, its rows for each head of values, and a state a chunk; FLA one square, and what
    it makes of queries and keys: its backward makes the states anew. Sources: ops/linear_attention/chunks.py;
    fla/ops/gated_delta_rule/chunk.py of fla-core 0.6.0.
    """
    e, (key_heads, value_heads, key_dim, value_dim) = size.e, net
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed, state, spread = (
        2 * keys + values,
        value_heads * key_dim * value_dim,
        value_heads * key_dim,
    )
    kept, backward, mlp = size.mlp
    gate = (12 + 3 * e) * values + 4 * value_heads
    before = kept + size.norm + gate  # gone when the rule's backward runs
    kept += 2 * size.norm + gate + e * mixed + 16 * value_heads
    held = 2 * e * size.width + e * values - before
    attention = 2 * e * size.width + 2 * e * mixed
    if rule == "fla":
        kept += e * (mixed + CHUNK * value_heads) + 8 * key_heads + 4 * value_heads
        attention += e * (4 * keys + 4 * values + spread + CHUNK * value_heads)
        terms = RuleBytes(
            backward=held + e * (4 * spread + 5 * values + keys),
            chunk=0,
            chunk_backward=2 * e * state,
            chunk_forward=e * state,
            chunk_products=0,
            branch=4 * state,
        )
    else:
        kept += e * mixed if e == 4 else 8 * keys  # what is normed, in float32
        squares = 6 * CHUNK * value_heads
        rows = squares + 4 * spread + 3 * values + 2 * keys + 6 * value_heads
        rows += 2 * spread if value_heads > key_heads else 0
        gradients = 3 * (CHUNK * value_heads + spread) + 2 * values
        forward = 4 * CHUNK * value_heads + 5 * spread + 6 * values
        products = 2 * CHUNK * key_heads + 3 * values
        terms = RuleBytes(
            backward=held,
            chunk=4 * (CHUNK * rows + state),
            chunk_backward=4 * CHUNK * gradients,
            chunk_forward=4 * CHUNK * forward,
            chunk_products=4 * (CHUNK * products + state),
            branch=0,
        )
    return LayerBytes(
        input=e * size.width,
        kept=kept,
        backward=backward,
        mlp=mlp,
        attention=attention,
        key=0,
        products=e * (mixed + values + 2 * value_heads + 2 * size.width + 2 * size.inner),
        rule=terms,
    )


def tower_bytes(
    fields: Mapping[str, Any], e: int, out_width: int, attention: str
) -> TowerBytes | None:
    """A block of the tower keeps its two norms, queries, keys, values, output and the inside of its MLP.

    LayerNorm keeps input and output. Values are a part of the joint product of Qwen's, and hold the whole of it under
    sdpa. InternVL scales what each half adds, and keeps it.
    """
    tower = fields.get("vision_config")
    if not tower:
        return None
    kind = tower_kind(str(fields.get("model_type") or ""))
    width = tower.get("embed_dim", 1280) if kind.ratio else tower["hidden_size"]
    inner = int(width * tower.get("mlp_ratio", 4)) if kind.ratio else tower["intermediate_size"]
    blocks = tower.get("depth") or tower["num_hidden_layers"]
    heads = tower.get("num_heads") or tower.get("num_attention_heads") or 16
    rms, layer_norm = (4 + 2 * e) * width, 2 * e * width + 8
    norm = rms if kind.mlp == "swiglu" else layer_norm
    rows = 4 * e * width  # queries, keys, values, output
    if attention == "sdpa":
        rows += e * width + (0 if kind.tiles else 2 * e * width)
    if kind.tiles:
        rows += 2 * e * width
        rows += 2 * (4 + 2 * e) * width if tower.get("use_qk_norm") else 0
    mlp, more = _MLP_ROWS[kind.mlp]
    levels = len(tower.get("deepstack_visual_indexes") or ())
    patch, channels = tower.get("patch_size", 14), tower.get("in_channels", 3)
    size = patch[0] * patch[-1] if isinstance(patch, (list, tuple)) else patch * patch
    # float32 pixels are the batch's own
    frames = 1 if kind.tiles else tower.get("temporal_patch_size", 2)
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
            attention=6 * e * width + (0 if kind.tiles else 28 * width),
            key=0,
        ),
        pixels=pixels + 8 * (width // heads),
        tiles=4 * channels * size if kind.tiles else 0,
        mergers=(1 + levels) * merger,
        features=(1 + levels) * e * out_width,
        copies=2 if levels else 1,
    )
