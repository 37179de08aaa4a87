"""FLOPs of a model's forward by what it counts, from its config: a product of [n, a] and [a, b] is 2·n·a·b of them.

H and I: width and width of the MLP; A and K: query and key heads, times their size. Products of the decoder's and the
tower's linear layers, attention and the head are counted; norms, activations and rotary are not. tests/adapters/
test_model_flops.py counts the same in transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmpack.families.kinds import decoder_kind, tower_kind
from mmpack.planning.configs import Fields, fields_of, required, text_of
from mmpack.planning.counts import Spans

NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of all layers: a packed row, a pair of a query and a key in layers of full attention and of windows, a
    loss token; and what is no FLOP: `key`, bytes in two-byte numbers of a key and a value in layers of attention;
    `queries`, their widths added up; `states`, entries of the linear layers' states, and how many such layers."""

    row: float
    pair: float
    window_pair: float
    loss_token: float
    key: int
    queries: int
    states: int
    linear_layers: int
    tower: TowerFlops
    spans: Spans


class _Layer(NamedTuple):
    """Weights of its products; FLOPs of a pair; widths of the queries, and of a key with its value."""

    weights: int
    pair: int = 0
    queries: int = 0
    keys: int = 0
    states: int = 0


def model_flops(config: Any) -> ModelFlops:
    """FLOPs by a model's config, or its config.json's dict. Raises ArgumentError where that lacks what is counted."""
    fields = fields_of(config, "cost_model")
    text = text_of(fields)
    required(text, NEEDED, "cost_model")
    kinds = _layer_types(text)
    # as transformers writes what single layers have otherwise
    own = text.get("per_layer_config") or {}
    layers = [
        _layer(text.with_own(own.get(str(n)) or own.get(n) or {}), kind, n)
        for n, kind in enumerate(kinds)
    ]
    near = [kind == "sliding_attention" for kind in kinds]
    weights = sum(layer.weights for layer in layers)
    # Gemma 4: one more product before the layers
    if extra := text.get("hidden_size_per_layer_input"):
        weights += text["hidden_size"] * extra * len(layers)
    tower = tower_flops(fields, text["hidden_size"])
    return ModelFlops(
        row=2.0 * weights,
        pair=float(sum(x.pair for x, w in zip(layers, near, strict=True) if not w)),
        window_pair=float(sum(x.pair for x, w in zip(layers, near, strict=True) if w)),
        loss_token=2.0 * text["vocab_size"] * text["hidden_size"],
        key=2 * sum(x.keys for x in layers),
        queries=sum(x.queries for x in layers),
        states=sum(x.states for x in layers),
        linear_layers=kinds.count("linear_attention"),
        tower=tower,
        spans=Spans(text.get("sliding_window") if any(near) else None, tower.tile),
    )


def _layer_types(text: Fields) -> list[str]:
    """As the config lists them; by its interval or pattern; else full attention in all."""
    count = text["num_hidden_layers"]
    if listed := text.get("layer_types"):
        return list(listed)[:count]
    if every := text.get("full_attention_interval"):
        return ["linear_attention" if (n + 1) % every else "full_attention" for n in range(count)]
    if every := text.get("sliding_window_pattern"):
        return ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(count)]
    return ["full_attention"] * count


def _layer(text: Fields, kind: str, number: int) -> _Layer:
    if kind == "linear_attention":
        mixing = _gated_delta(text)
    elif text.get("kv_lora_rank"):
        mixing = _latent(text)
    else:
        mixing = _attention(text, kind, number)
    more = _mlp(text, number)
    if extra := text.get("hidden_size_per_layer_input"):
        more += 2 * text["hidden_size"] * extra
    return mixing._replace(weights=mixing.weights + more)


def _attention(text: Fields, kind: str, number: int) -> _Layer:
    width, heads = text["hidden_size"], text["num_attention_heads"]
    size = text.get("head_dim") or width // heads
    key_heads = text.get("num_key_value_heads") or heads
    made = 2  # products for keys and values
    if kind == "full_attention" and text.get("global_head_dim"):  # Gemma 4
        size = text["global_head_dim"]
        if text.get("attention_k_eq_v"):
            key_heads, made = text.get("num_global_key_value_heads") or key_heads, 1
    if number >= text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0):
        made = 0  # of an earlier layer
    across, keys = heads * size, key_heads * size
    # gates of what attention gives, by as many columns of the queries' product
    kind_of_decoder = decoder_kind(str(text.get("model_type") or ""))
    gates = across if kind_of_decoder is not None and kind_of_decoder.gated else 0
    weights = width * (across + gates + made * keys) + across * width
    return _Layer(weights, 4 * across, across, 2 * keys)


def _latent(text: Fields) -> _Layer:
    """DeepSeek-V3's: queries, keys and values are made of narrow latents."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    turned, value = text["qk_rope_head_dim"], text["v_head_dim"]
    size, rank = text["qk_nope_head_dim"] + turned, text["kv_lora_rank"]
    narrow = text.get("q_lora_rank")
    weights = narrow * (width + heads * size) if narrow else width * heads * size
    weights += width * (rank + turned) + rank * heads * (size - turned + value)
    weights += heads * value * width
    return _Layer(weights, 2 * heads * (size + value), heads * size, heads * (size + value))


def _gated_delta(text: Fields) -> _Layer:
    """Qwen3.5's linear attention: queries and keys, values, a gate of their width, two numbers a head, the output."""
    width, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    weights = width * (2 * keys + 2 * values + 2 * heads) + values * width
    return _Layer(weights, states=values * text["linear_key_head_dim"])


def _mlp(text: Fields, number: int) -> int:
    """Weights that a row meets: three products of an MLP, or the router and the experts that it takes."""
    width, inner = text["hidden_size"], text.get("intermediate_size") or 0
    shares = text.get("num_kv_shared_layers") or 0
    if text.get("use_double_wide_mlp") and number >= text["num_hidden_layers"] - shares:
        inner *= 2
    dense = 3 * width * inner
    named = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((text[name] for name in named if text.get(name)), 0)
    if not experts or text.get("enable_moe_block") is False or not _routed(text, number):
        return dense
    taken = text.get("num_experts_per_tok") or text.get("top_k_experts") or 1
    narrow = text["moe_intermediate_size"]
    weights = width * experts + 3 * width * narrow * taken
    if shared := text.get("shared_expert_intermediate_size"):
        weights += 3 * width * shared + width  # and its gate
    weights += 3 * width * narrow * (text.get("n_shared_experts") or 0)
    return weights + (dense if text.get("enable_moe_block") else 0)


def _routed(text: Fields, number: int) -> bool:
    """Whether a layer of a model with experts has them."""
    if number < (text.get("first_k_dense_replace") or 0):
        return False
    step = text.get("decoder_sparse_step") or 1
    return number not in (text.get("mlp_only_layers") or ()) and (number + 1) % step == 0


@dataclass(frozen=True)
class TowerFlops:
    """A patch; a pair of patches of one frame, in blocks that see whole frames; a pair within one window, in the other
    blocks; a frame of an audio's features. `width`: of the queries, all blocks added up. `tile`: patches on a side of a
    window, None where there are none."""

    patch: float = 0.0
    frame_pair: float = 0.0
    tile_pair: float = 0.0
    audio_frame: float = 0.0
    width: int = 0
    tile: int | None = None


def tower_flops(fields: Fields, out: int) -> TowerFlops:
    """`out`: the decoder's width. Raises ArgumentError for a tower whose config lacks what is counted."""
    heard = _audio_frame(fields.get("audio_config") or {})
    tower = fields.get("vision_config")
    if not tower:
        return TowerFlops(audio_frame=heard)
    whole = str(fields.get("model_type") or "")
    ratio = tower_kind(whole).ratio
    width = tower.get("embed_dim" if ratio else "hidden_size") or 0
    blocks = tower.get("depth") or tower.get("num_hidden_layers") or 0
    inner = int(width * tower.get("mlp_ratio", 4)) if ratio else tower.get("intermediate_size")
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "intermediate_size": inner}
    required(sizes, tuple(sizes), "cost_model: vision_config")
    kind = tower_kind(whole, str(tower.get("model_type") or ""))
    products = 3 if kind.mlp == "swiglu" else 2
    block = 4 * width * width + products * width * inner
    merged = _side(tower.get("spatial_merge_size") or fields.get("spatial_merge_size") or 2) ** 2
    tile = _tile(tower)
    wide = len(tower["fullatt_block_indexes"]) if tile else blocks
    # a quarter of the patches is left after one block
    inserted = fields.get("insert_layer_id") if kind.merging == "twice" else None
    weights, frames = float(blocks * block), float(wide)
    if inserted is not None:
        after = blocks - inserted - 1
        weights -= after * block * 3 / 4
        frames -= after * 15 / 16
    return TowerFlops(
        patch=2.0
        * (weights + _embedding(tower, width) + _WAYS[kind.merging](fields, width, out, merged)),
        frame_pair=4.0 * width * frames,
        tile_pair=4.0 * width * (blocks - wide),
        audio_frame=heard,
        width=blocks * width,
        tile=tile,
    )


def _tile(tower: Fields) -> int | None:
    """Patches on a side of a window, where some blocks see windows."""
    if tower.get("fullatt_block_indexes") is None or not tower.get("window_size"):
        return None
    merge = tower.get("spatial_merge_size") or 2
    return tower["window_size"] // merge // _side(tower.get("patch_size") or 14) * merge


def _embedding(tower: Fields, width: int) -> int:
    frames = tower.get("temporal_patch_size") or 1
    channels = tower.get("in_channels") or tower.get("num_channels") or 3
    return width * channels * frames * _side(tower.get("patch_size") or 14) ** 2


def _side(size: int | list[int] | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]


# Weights that a patch meets on its way into a token, for each way of merging.
_Merging = Callable[[Fields, int, int, int], float]


def _beside(fields: Fields, width: int, out: int, merged: int) -> float:
    """Two products of `merged` patches joined in one row; deepstack's levels each have their own."""
    beside = merged * width
    levels = 1 + len(fields["vision_config"].get("deepstack_visual_indexes") or ())
    return levels * (beside * beside + beside * out) / merged


def _folded(fields: Fields, width: int, out: int, merged: int) -> float:
    return width * out + out * out / merged


def _product(fields: Fields, width: int, out: int, merged: int) -> float:
    """One product of all patches of a token joined in one row."""
    return width * out


def _unmerged(fields: Fields, width: int, out: int, merged: int) -> float:
    """Two products of each patch: nothing is merged."""
    return width * out + out * out


def _convolved(fields: Fields, width: int, out: int, merged: int) -> float:
    """A convolution over the patches of a token, a product, and an MLP of three."""
    inner = fields["vision_config"]["intermediate_size"]
    return width * out + (out * out + 3 * out * inner) / merged


def _pooled(fields: Fields, width: int, out: int, merged: int) -> float:
    """One product for each token, of the mean of its patches."""
    tower = fields["vision_config"]
    if tower.get("pooling_kernel_size"):
        return width * out / _side(tower["pooling_kernel_size"]) ** 2
    tokens = fields.get("mm_tokens_per_image") or 256
    sides = {"image_size": _side(tower["image_size"]), "patch_size": _side(tower["patch_size"])}
    required(sides, tuple(sides), "cost_model: vision_config")
    return width * out * tokens / max(sides["image_size"] // sides["patch_size"], 1) ** 2


def _mixed(fields: Fields, width: int, out: int, merged: int) -> float:
    return width * width + (width * out + out * out) / merged


def _twice(fields: Fields, width: int, out: int, merged: int) -> float:
    """In the middle of the tower attention of windows and two products make one patch of four; then again."""
    inner = fields["vision_config"]["intermediate_size"]
    window = 4 * width * width + (4 * width * 4 * inner + 4 * inner * width) / 4
    return window + (16 * width * width + 4 * width * out) / 16


_WAYS: dict[str, _Merging] = {
    "beside": _beside,
    "folded": _folded,
    "product": _product,
    "unmerged": _unmerged,
    "convolved": _convolved,
    "pooled": _pooled,
    "mixed": _mixed,
    "twice": _twice,
}


def _audio_frame(audio: Mapping[str, Any]) -> float:
    """Blocks of an encoder of Whisper's kind: of two frames Qwen2.5-Omni makes one row, of eight Qwen3-Omni."""
    width, layers = audio.get("d_model"), audio.get("encoder_layers")
    if not width or not layers:
        return 0.0
    block = 4 * width * width + 2 * width * (audio.get("encoder_ffn_dim") or 4 * width)
    return 2.0 * layers * block / (8 if audio.get("downsample_hidden_size") else 2)
