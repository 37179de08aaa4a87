"""FLOPs of a tower's forward, from its config; planning/flops.py says what is counted.

W and I: width and width of the MLP. A patch counts what it meets in all blocks, its own embedding, and its share of
what merges patches into tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmpack.families.kinds import tower_kind
from mmpack.planning.configs import Fields, required


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
    """Two products of `merged` patches beside each other; deepstack's levels each have their own."""
    beside = merged * width
    levels = 1 + len(fields["vision_config"].get("deepstack_visual_indexes") or ())
    return levels * (beside * beside + beside * out) / merged


def _folded(fields: Fields, width: int, out: int, merged: int) -> float:
    return width * out + out * out / merged


def _product(fields: Fields, width: int, out: int, merged: int) -> float:
    """One product of all patches of a token beside each other."""
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
