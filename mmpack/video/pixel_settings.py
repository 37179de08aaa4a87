"""How pixels become float: `rescale_factor`, `mean` and `std` of `pack_video`, one value per channel, checked."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.video.patches import CHANNELS

_LEAST, _MOST = 1e-37, 1e37  # of factors: they and their inverse are float32


def normalization(settings: dict[str, Any] | None) -> dict[str, Any]:
    """`rescale_factor`, `mean` and `std` for `pack_video`, from the video part of `Sample.processor`.

    Raises: ArgumentError where the settings don't say.
    """
    switches = ("do_rescale", "do_normalize")
    if not isinstance(settings, dict) or not all(
        isinstance(settings.get(name), bool) for name in switches
    ):
        raise ArgumentError(
            "normalization: the settings lack do_rescale or do_normalize. "
            "Fix: pass processor['video'] as mp.wrap_processor records it"
        )
    scale = mean = std = None
    if settings["do_rescale"]:
        scale = divisor("normalization: rescale_factor", settings.get("rescale_factor"))
    if settings["do_normalize"]:
        mean = of_channels("normalization: image_mean", settings.get("image_mean"))
        std = of_channels("normalization: image_std", settings.get("image_std"), divisors=True)
    return {"rescale_factor": scale, "mean": mean, "std": std}


def byte_values(settings: dict[str, Any] | None) -> np.ndarray:
    """float32 [3, 256]: what the processor makes of each byte of a channel, rounded step by step as it rounds.

    `settings`: the image or video part of `Sample.processor`. transformers' processors of torchvision (and mmpack's
    `FrameProcessor`) fold the rescaling into mean and std; those of Pillow rescale, then normalise.
    Raises: ArgumentError where the settings don't say both, or which.
    """
    how = normalization(settings)
    backend = (settings or {}).get("backend")
    if None in how.values() or backend not in ("torchvision", "pil"):
        raise ArgumentError(
            f"byte_values: the settings have do_rescale={how['rescale_factor'] is not None}, do_normalize="
            f"{how['mean'] is not None}, backend={backend!r:.20}; uint8 pixels need both, with backend "
            "'torchvision' or 'pil'. "
            "Fix: use a processor that rescales and normalises, or pixels='float32'"
        )
    return normalized_bytes(backend, how["rescale_factor"], how["mean"], how["std"])


@functools.lru_cache(maxsize=64)
def normalized_bytes(
    backend: str, rescale: float, mean: tuple[float, ...], std: tuple[float, ...]
) -> np.ndarray:
    """float32 [3, 256]: each byte of a channel, rescaled and normalised as the backend rounds."""
    values = np.arange(256)
    centre, spread = (np.array(x, np.float32)[:, None] for x in (mean, std))
    if backend == "pil":
        out = ((values * rescale).astype(np.float32) - centre) / spread
    else:
        factor = np.float32(1.0 / rescale)
        out = (values.astype(np.float32) - centre * factor) / (spread * factor)
    out.flags.writeable = False  # every caller gets this one
    return out


def of_channels(what: str, values: Any, *, divisors: bool = False) -> tuple[float, ...]:
    """A float per channel. Raises: ArgumentError where they are not CHANNELS finite numbers, or a divisor is 0."""
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != CHANNELS:
        raise ArgumentError(
            f"{what} is {values!r:.60}. Fix: pass {CHANNELS} numbers, one per channel"
        )
    one = divisor if divisors else _number
    return tuple(one(what, value) for value in values)


def divisor(what: str, value: Any) -> float:
    """`value` as float. Raises: ArgumentError for what is no finite number, or 0."""
    number = _number(what, value)
    if abs(number) < _LEAST:
        raise ArgumentError(f"{what} holds {number!r}. Fix: pass a number other than 0")
    return number


def _number(what: str, value: Any) -> float:
    kinds = (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not -_MOST < value < _MOST:
        raise ArgumentError(f"{what} holds {value!r:.40}. Fix: pass finite numbers")
    return float(value)
