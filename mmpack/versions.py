"""What older transformers lack or do otherwise; all other code is written for the newest.

The object at hand is asked, not its version's number, so that builds from source and vendors' copies answer too.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from typing import Any

from mmpack.errors import ModelError, installed_version
from mmpack.families import Family


def has_family(family: Family) -> bool:
    """Whether the installed transformers has the family, with a forward that takes mmpack's inputs."""
    oldest, found = family.oldest_transformers, installed_version("transformers")
    return oldest is None or found is None or _release(found) >= _release(oldest)


def refuse_old_transformers(family: Family, what: str) -> None:
    """Raise ModelError, as `what`, where transformers is too old for the family."""
    if not has_family(family):
        raise ModelError(
            f"{what}: {family.name} needs transformers {family.oldest_transformers} or newer, "
            f"{installed_version('transformers')} is installed. Fix: install a newer transformers"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split(".")[:2])


# ---- forwards ----------------------------------------------------------------------------------------


def takes_encoded_media(model: Any) -> bool:
    """Whether the forward takes media that were encoded before: `mm_encoder_outputs`, from transformers 5.19 on."""
    return "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters


def refuse_old_forward(model: Any, what: str, instead: str) -> None:
    """Raise ModelError, as `what`, where the forward takes no encoded media."""
    if not takes_encoded_media(model):
        raise ModelError(
            f"{what}: the forward of transformers {installed_version('transformers')} takes no media encoded "
            f"beforehand. Fix: install transformers 5.19 or newer, or {instead}"
        )


def cache_argument(decoder: Any) -> str:
    """What a decoder's forward calls its keys and values of earlier tokens: `cache`, before 5.24 `past_key_values`."""
    parameters = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@functools.cache
def towers_take_known() -> bool:
    """Whether a vision tower's forward takes what it would make of the grids: from 5.9 on."""
    return importlib.util.find_spec("transformers.vision_utils") is not None


def interpolation(embeddings: Any, grids: Any, merge: int) -> dict[str, Any]:
    """The tower's arguments that interpolate its learned positions: indices and weights, renamed in 5.15."""
    from transformers import vision_utils

    side = embeddings.num_grid_per_side
    if hasattr(vision_utils, "get_vision_interpolation_indices_and_weights"):
        how = side, embeddings.interpolation_mode, embeddings.interpolation_align_corners
        names = "interp_indices", "interp_weights"
        both = vision_utils.get_vision_interpolation_indices_and_weights(grids, *how, merge)
    else:
        names = "bilinear_indices", "bilinear_weights"
        both = vision_utils.get_vision_bilinear_indices_and_weights(grids, side, merge)
    return dict(zip(names, both, strict=True))


@functools.cache
def blocks_keep_to_windows() -> bool:
    """Whether placeholders that see each other do so within a layer's window only: from 5.9 on."""
    from transformers import masking_utils

    return "block_sequence_ids" in inspect.signature(masking_utils.create_causal_mask).parameters


@functools.cache
def checkpointing_runs_hooks() -> bool:
    """Whether gradient checkpointing runs a layer's own hooks again. From 5.23 on, only its forward runs again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" in vars(GradientCheckpointingLayer)


# ---- processors --------------------------------------------------------------------------------------

# Where each temporal patch gets its own vision start and end: whether those around the video's placeholder stay. Before
# 5.10 all three tokens were replaced, since then only the placeholder.
KEPT, REPLACED = "kept", "replaced"


def video_markers(hf_processor: Any) -> str:
    """KEPT or REPLACED. The release that keeps them added the method `replace_video_token`."""
    old = hf_processor is not None and not hasattr(hf_processor, "replace_video_token")
    return REPLACED if old else KEPT


def size_of_videos(hf_processor: Any) -> Any:
    """The size that a processor passes to its video processor at each call (Qwen-Omni's do), or None."""
    own = getattr(hf_processor, "videos_kwargs", None)
    if own is None:  # before 5.23
        own = getattr(getattr(hf_processor, "valid_processor_kwargs", None), "_defaults", {})
        own = own.get("videos_kwargs", {})
    return own.get("size") if isinstance(own, dict) else None


def own_budgets(video_processor: Any) -> dict[str, bool]:
    """The option with which frames share no budget of pixels; before 5.16 they share none, and there is no option."""
    return (
        {"cap_pixels_per_frame": False} if hasattr(video_processor, "cap_pixels_per_frame") else {}
    )


def sampling_rules(video_processor: Any) -> str:
    """Which rules resize videos, "5.15" or "5.8": those of the release that the video processor is from."""
    package = type(video_processor).__module__.partition(".")[0]
    if package != "transformers":
        return "5.15"
    return "5.15" if _release(sys.modules[package].__version__) >= (5, 15) else "5.8"
