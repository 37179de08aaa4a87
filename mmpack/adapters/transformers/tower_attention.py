"""The towers' attention "mmpack_flash_tower": all windows, pictures and frames of a pack in one launch.

transformers calls attention window by window, unless its name holds `flash`: then once, with `cu_seq_lens_q`. What
follows from the grids is made on the host, once per forward: the tower asks the GPU for nothing, layer by layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface

from mmpack.adapters.transformers.modules import audio_tower_of, tower_of
from mmpack.adapters.transformers.parts import Part
from mmpack.errors import ModelError
from mmpack.ops.attention import (
    SequencePlan,
    plan_sequences,
    plan_tiles,
    resolve_sequences,
    sequence_attention,
)
from mmpack.versions import interpolation, towers_take_known

NAME = "mmpack_flash_tower"
PLAN = "_mmpack_plan"  # on a tensor of cu_seqlens
LENGTHS = "line_lengths"  # keyword of a tower of lines: patches of each picture, known on the host


class TowerPlans(NamedTuple):
    """The sequences of a forward's layers, which get them as the keyword `tower_plans`."""

    frames: SequencePlan  # of layers with full attention: each picture, each frame of a video; each clip of Kimi's
    windows: SequencePlan | None

    def of(self, cu_seqlens: torch.Tensor) -> SequencePlan | None:
        """That of a layer's cu_seqlens. Windows divide frames: as many of both are the same ones."""
        count = cu_seqlens.shape[0] - 1
        return next((p for p in self if p is not None and p.sequences == count), None)


@dataclass(frozen=True, eq=False)
class LinePlan:
    """Pictures as lines of patches, each padded to the longest: a layer's rows see those of their own picture."""

    pictures: SequencePlan
    rows: torch.Tensor | None  # int64 [patches]: which of the B · S rows are patches; None: all are

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """[B, heads, S, d] -> [B, S, heads, d], zeros where padding is."""
        if self.rows is None:
            return sequence_attention(
                query, key, value, self.pictures, scale=scale, dropout=dropout
            )
        rows = self.rows
        q, k, v = (
            x.transpose(1, 2).flatten(0, 1).index_select(0, rows).transpose(0, 1)[None]
            for x in (query, key, value)
        )
        out = sequence_attention(q, k, v, self.pictures, scale=scale, dropout=dropout)[0]
        lines = query.shape[0], query.shape[2]
        whole = out.new_zeros(lines[0] * lines[1], *out.shape[1:])
        return whole.index_copy(0, rows, out).unflatten(0, lines)


def plan_lines(lengths: Sequence[int], longest: int, device: torch.device) -> LinePlan:
    """The plan of lines of these lengths, padded to `longest`."""
    pictures = _moved(plan_sequences(lengths), device)
    if min(lengths) == longest:
        return LinePlan(pictures, None)
    rows = np.concatenate([np.arange(n) + k * longest for k, n in enumerate(lengths)])
    return LinePlan(pictures, _moved(torch.from_numpy(rows), device))


def tower_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    tower_plans: TowerPlans | None = None,
    tower_lines: LinePlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, heads, S, d], key and value of that shape -> [B, S, heads, d].

    Without `cu_seq_lens_q` and plans (InternVL's tiles) each of the B lines is one sequence.
    """
    if attention_mask is not None:
        raise ModelError(
            "mmpack tower attention: an attention_mask was passed, but each of the tower's rows attends within "
            "its own sequence only. "
            "Fix: call attach(model, tower='keep')"
        )
    if tower_lines is not None:
        return tower_lines.attend(query, key, value, scaling, dropout), None
    if cu_seq_lens_q is None:
        # pictures of unlike sizes, one after the other, or one tile a line
        whole = None if tower_plans is None else tower_plans.frames
        plan = whole or plan_tiles(query.shape[0], query.shape[2], query.device)
    else:
        known = None if tower_plans is None else tower_plans.of(cu_seq_lens_q)
        plan = known or _plan_of(cu_seq_lens_q)
    return sequence_attention(query, key, value, plan, scale=scaling, dropout=dropout), None


def _plan_of(cu_seqlens: torch.Tensor) -> SequencePlan:
    """Plan of sequences that have none yet, as an audio tower's chunks; made once for a forward's layers."""
    plan: SequencePlan | None = getattr(cu_seqlens, PLAN, None)
    if plan is None:
        plan = plan_sequences(cu_seqlens.diff().tolist())
        setattr(cu_seqlens, PLAN, plan)
    return plan


def on_their_device(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keywords of get_image_features, pixels first: grids stay on the CPU if the tower gets its precomputed positions.

    Else the tower computes these from the grids, which then go to the device of the pixels.
    """
    attached = TOWER.is_attached(tower_of(model.model))
    if not attached:
        arguments = {name: x for name, x in arguments.items() if name != LENGTHS}
    if attached and takes_known(tower_of(model.model)):
        return arguments
    device = next(iter(arguments.values())).device
    return {name: x.to(device) if torch.is_tensor(x) else x for name, x in arguments.items()}


def _tell(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the tower's forward: the plans of its layers and, where it takes them, what it would make of the grids."""
    lengths = kwargs.pop(LENGTHS, None)
    if not TOWER.is_attached(tower):
        return args, kwargs  # a deep copy, which has the hook
    if kwargs.get("pixel_position_ids") is not None:
        places = kwargs["pixel_position_ids"]
        if lengths is None:  # asks the device; mmpack's own calls say them
            lengths = (places != -1).all(dim=-1).sum(dim=-1).tolist()
        lines = plan_lines(lengths, places.shape[1], places.device)
        return args, kwargs | {"tower_lines": lines}
    if kwargs.get("image_sizes") is not None:
        return args, kwargs | {"tower_plans": _plans_of_sizes(tower, args, kwargs)}
    if not (hasattr(tower, "spatial_merge_size") or _takes_clips(tower)):
        return args, kwargs  # a tower of tiles, or one that makes all by itself
    grids = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
    given = any(kwargs.get(name) is not None for name in ("cu_seqlens", "cu_window_seqlens"))
    if grids is None or given:
        return args, kwargs
    name = "pixel_values" if _takes_clips(tower) else "hidden_states"
    device = (args[0] if args else kwargs[name]).device
    grids = grids.cpu()
    frames, windows = (
        None if x is None else plan_sequences(x) for x in sequence_lengths(tower, grids)
    )
    assert frames is not None
    plans = TowerPlans(_moved(frames, device), None if windows is None else _moved(windows, device))
    for plan in plans:
        if plan is not None:
            resolve_sequences(plan, device, _head_dim(tower.config))
    make = _known_of_clips if _takes_clips(tower) else _known
    known = make(tower, grids, plans, device) if takes_known(tower) else {}
    if hasattr(tower, "embeddings") and "grid_thw" in kwargs:  # which look each patch's grid up
        kwargs = kwargs | {"grid_thw": _moved(grids, device)}
    return args, known | kwargs | {"tower_plans": plans}


def takes_known(tower: Any) -> bool:
    """Whether the tower's forward, if it is transformers' own, takes what it would make of the grids."""
    return towers_take_known() and type(tower).forward.__module__.startswith("transformers.")


def _takes_clips(tower: Any) -> bool:
    """Is it Kimi K2.5's? There the frames of a clip see each other, then they are averaged."""
    return getattr(tower, "config", tower).model_type == "kimi_k25_vision"


def _plans_of_sizes(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TowerPlans:
    """Plans of a tower that takes pictures of unlike sizes as one tensor, and their sizes in pixels."""
    device = (args[0] if args else kwargs["pixel_values"]).device
    sizes = torch.as_tensor(kwargs["image_sizes"]).cpu() // tower.patch_size
    plan = _moved(plan_sequences(sizes.prod(dim=-1).numpy()), device)
    resolve_sequences(plan, device, _head_dim(tower.config))
    return TowerPlans(plan, None)


def sequence_lengths(tower: Any, grids: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    """Patches of each frame (each clip, where frames are averaged), and of each window where the tower has windows.

    Both in the order of its rows.

    Args: `tower`: or its config. `grids`: int [media, 3], of patches, on the CPU.
    """
    times, heights, widths = grids.numpy().T
    if _takes_clips(tower):
        return times * heights * widths, None
    frames = np.repeat(heights * widths, times)
    if not hasattr(tower, "window_size"):
        return frames, None
    side = tower.window_size // tower.patch_size // tower.spatial_merge_size
    unit = tower.spatial_merge_size
    windows = [
        np.tile(np.outer(_cut(h // unit, side), _cut(w // unit, side)).ravel(), t)
        for t, h, w in grids.tolist()
    ]
    return frames, np.concatenate(windows) * unit**2


def _cut(length: int, side: int) -> np.ndarray:
    """Lengths of the pieces of `side`, the last one what is left."""
    return np.diff(np.append(np.arange(0, length, side), length))


def _known(
    tower: Any, grids: torch.Tensor, plans: TowerPlans, device: torch.device
) -> dict[str, Any]:
    """What the tower's forward would make of the grids, by the same functions; it asks the GPU for all of it."""
    from transformers import vision_utils

    merge = tower.spatial_merge_size
    move = functools.partial(_moved, device=device)
    known = _sequences(plans) | {
        "position_ids": move(vision_utils.get_vision_position_ids(grids, merge))
    }
    if plans.windows is not None:
        index, _ = vision_utils.get_vision_window_index(
            grids, merge, tower.window_size, tower.patch_size
        )
        known["window_index"] = move(index)
        known["cu_window_seqlens"] = plans.windows.cu_seqlens
        known["max_window_seqlen"] = plans.windows.max_seqlen
    if hasattr(tower, "num_grid_per_side"):
        known |= {n: move(x) for n, x in interpolation(tower, grids, merge).items()}
    return known


def _known_of_clips(
    tower: Any, grids: torch.Tensor, plans: TowerPlans, device: torch.device
) -> dict[str, Any]:
    """As `_known`, of Kimi K2.5's tower: its patches lie line by line, and frames have a place in time."""
    from transformers import vision_utils
    from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

    rows = {
        "position_ids": vision_utils.get_vision_position_ids(grids, 1),
        "frame_index": kimi.get_vision_frame_index(grids),
        "temporal_merge_index": kimi.get_vision_temporal_merge_index(
            grids, *tower.merge_kernel_size
        ),
    } | interpolation(tower.patch_embed.pos_emb, grids, 1)
    return _sequences(plans) | {name: _moved(x, device) for name, x in rows.items()}


def _sequences(plans: TowerPlans) -> dict[str, Any]:
    frames = plans.frames
    return {"cu_seqlens": frames.cu_seqlens, "max_seqlen": frames.max_seqlen}


def _moved(x: Any, device: torch.device) -> Any:
    """A tensor, a plan or several on `device`; the host does not wait for it. Numbers stay."""
    if isinstance(x, tuple):
        return tuple(_moved(part, device) for part in x)
    if isinstance(x, int):
        return x
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _head_dim(config: Any) -> int:
    # hidden_size of Qwen2-VL is of the tower's output
    width = getattr(config, "embed_dim", None) or config.hidden_size
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    return int(width // heads)


def _register() -> None:
    AttentionInterface.register(NAME, tower_attention)


def _hook(core: Any) -> list[Any]:
    return [tower_of(core).register_forward_pre_hook(_tell, with_kwargs=True)]


TOWER = Part("vision tower", NAME, tower_of, _register, _hook)
AUDIO_TOWER = Part("audio tower", NAME, audio_tower_of, _register, lambda core: [])
