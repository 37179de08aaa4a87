"""One running engine for the tests that need it: starting one takes most of a minute. And its tiny checkpoint."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from typing import Any

import numpy as np
import torch
from support.tiny_models import tiny_qwen2_5_vl

from mmpack.adapters.transformers.load import load_checkpoint
from mmpack.adapters.vllm import VllmEngine
from mmpack.demo.qwen_processor import qwen_vl_processor

_running: dict[str, Any] = {}


@cache
def checkpoint() -> str:
    """A folder with 20 M random parameters and a processor of small pictures."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    tiny_qwen2_5_vl(0).save_pretrained(folder.name)
    qwen_vl_processor(max_pixels=64 * 28 * 28).save_pretrained(folder.name)
    return folder.name


@cache
def trainer() -> tuple[Any, Any]:
    """Model and processor of the checkpoint."""
    return load_checkpoint(checkpoint())


class KeptEngine(VllmEngine):
    """Stays open when a job is done with it."""

    def close(self) -> None:
        pass


def shared_engine(folder: str = "", **settings: Any) -> VllmEngine:
    """The running engine if its settings are these, else a new one in its place. `folder` is not read again."""
    asked = {"dtype": "float32", "chunked_prefill": None, "prefix_caching": True}
    asked |= {"video_settings": {"fps": 2.0}} | settings
    if _running.get("settings") != asked:
        if _running:
            VllmEngine.close(_running.pop("engine"))
        _running.update(settings=asked, engine=KeptEngine(checkpoint(), **asked))
    return _running["engine"]


def close_shared() -> None:
    """For a model of another kind: engines of one process share vLLM's groups, and a dense one has none of experts."""
    if _running:
        VllmEngine.close(_running.pop("engine"))
        _running.clear()


def reset(engine: VllmEngine) -> None:
    """The checkpoint's weights, an empty cache, and the sampler's first state."""
    engine.load_weights(trainer()[0].state_dict(), "0")
    torch.manual_seed(0)


def picture(seed: int, width: int = 120, height: int = 90) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def messages(
    *parts: Any, text: str = "What is the size of the angle x in this figure?"
) -> list[Any]:
    """One turn of a user's: media as parts, then the text."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def image(seed: int, **size: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(seed, **size)}


def video(seed: int, frames: int = 8, fps: float = 2.0) -> dict[str, Any]:
    clip = np.random.default_rng(seed).integers(0, 256, (frames, 112, 112, 3), dtype=np.uint8)
    return {"type": "video", "video": (clip, {"fps": fps})}
