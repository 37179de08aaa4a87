"""What transformers' releases do unlike each other, as far as processors depend on it."""

from __future__ import annotations

import sys
from typing import Any

# What becomes of vision start and end around a video's placeholder, where each temporal patch gets its own:
# transformers before 5.10 replaced all three, since then only the placeholder: the two stay.
KEPT, REPLACED = "kept", "replaced"


def video_markers(hf_processor: Any) -> str:
    """KEPT or REPLACED: transformers has had a method of this name for as long as the markers stay."""
    old = hf_processor is not None and not hasattr(hf_processor, "replace_video_token")
    return REPLACED if old else KEPT


def size_of_videos(hf_processor: Any) -> Any:
    """The size that a whole processor hands its video processor at each call; None: none (Qwen-Omni's do)."""
    own = getattr(hf_processor, "videos_kwargs", None)
    if own is None:  # before transformers 5.22
        own = getattr(getattr(hf_processor, "valid_processor_kwargs", None), "_defaults", {})
        own = own.get("videos_kwargs", {})
    return own.get("size") if isinstance(own, dict) else None


def sampling_rules(video_processor: Any) -> str:
    """Which of transformers' rules: those of the release that the video processor is of, which has loaded it."""
    package = type(video_processor).__module__.partition(".")[0]
    if package != "transformers":
        return "5.15"
    major, minor = (int(n) for n in sys.modules[package].__version__.split(".")[:2])
    return "5.15" if (major, minor) >= (5, 15) else "5.8"
