"""Causes by which an audio differs: another rate, another hop, other padding."""

from __future__ import annotations

from collections.abc import Iterator

from mmpack.parity.causes.alike import Cause, both, differ, differing, known_as_one, other_keys
from mmpack.parity.causes.pair import Pair, possible
from mmpack.parity.causes.settings import decisive, settings_of
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.media import Medium

CAUSES = ("audio_sampling_rate", "audio_hop", "audio_padding")
_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_SHOWN = {
    "audio_sampling_rate": ("sampling_rate", "num_samples"),
    "audio_hop": ("hop_length", "grid_thw"),
    "audio_padding": ("num_samples", "grid_thw"),
}


def audio_causes(pair: Pair, a: Medium, b: Medium) -> Iterator[Cause]:
    """Every cause that the two records give evidence of; else one that is unknown."""
    if family := decisive(pair, "audio"):
        yield "model_family", family
        return
    found = [cause for cause in CAUSES if _differs(pair, cause, a, b)]
    if "audio_sampling_rate" in found or "audio_hop" in found:
        found = [
            cause
            for cause in found
            if cause != "audio_padding" or settings_of(pair, "audio", cause)
        ]
    if found and differ(a.content_hash, b.content_hash) and not _one_audio(found, a, b):
        found = []
    for cause in found:
        shown = [both(a, b, name) for name in differing(a, b, *_SHOWN[cause])]
        settings = settings_of(pair, "audio", cause)
        yield cause, "; ".join([*shown, *([settings] if settings else [])])
    if not found:
        yield _unexplained(pair, a, b)


def _differs(pair: Pair, cause: str, a: Medium, b: Medium) -> bool:
    if settings_of(pair, "audio", cause):
        return True
    if cause == "audio_sampling_rate":
        return differ(a.sampling_rate, b.sampling_rate) or _as_if_resampled(a, b)
    if cause == "audio_hop":
        return differ(a.hop_length, b.hop_length)
    # the same samples, one frame more or fewer, or cut at another length
    same = a.content_hash is not None and a.content_hash == b.content_hash
    return same and (a.grid_thw != b.grid_thw or differ(a.num_samples, b.num_samples))


def _as_if_resampled(a: Medium, b: Medium) -> bool:
    """Whether the sides' sample counts of one file are in the ratio of two common sampling rates."""
    if not known_as_one(a, b) or not a.num_samples or not b.num_samples:
        return False
    few, many = sorted((a.num_samples, b.num_samples))
    ratios = {y / x for x in _RATES for y in _RATES if x < y}
    return any(abs(few * ratio - many) <= 2 * ratio for ratio in ratios)


def _one_audio(found: list[str], a: Medium, b: Medium) -> bool:
    """Whether samples that differ may be of one audio: resampled, and nothing says that they are of two."""
    if "audio_sampling_rate" not in found:
        return False
    if _as_if_resampled(a, b):
        return True
    if known_as_one(a, b) or not (a.sampling_rate and b.sampling_rate):
        return True
    if a.num_samples is None or b.num_samples is None:
        return True
    # as long, but for a sample of rounding at each end
    off = abs(a.num_samples / a.sampling_rate - b.num_samples / b.sampling_rate)
    return off <= 2 / min(a.sampling_rate, b.sampling_rate)


def _unexplained(pair: Pair, a: Medium, b: Medium) -> Cause:
    if differ(a.content_hash, b.content_hash):
        same = (
            "of one file" if known_as_one(a, b) else "and nothing says that they are of one audio"
        )
        return UNKNOWN, f"other samples, {same}; {both(a, b, 'content_hash')}; {possible(*CAUSES)}"
    if a.grid_thw != b.grid_thw:
        return UNKNOWN, f"{both(a, b, 'grid_thw')}; {possible(*CAUSES)}"
    return other_keys(pair, a, b)
