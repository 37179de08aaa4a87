"""What a feature extractor of transformers makes of one audio: features [frames, mel_bins], without its padding.

Each audio is extracted by itself, so that its features don't depend on what else a batch holds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.audio.decoding import decode
from mmpack.errors import ArgumentError, kind_of
from mmpack.families import Audio, Family
from mmpack.layout.fingerprint import audio_hash, cache_key
from mmpack.processors.cache import MediaCache, Processed
from mmpack.processors.data_url import check_read
from mmpack.processors.images import path_below
from mmpack.schema.media import Medium

_LOUDEST = 32.0  # samples are about -1 to 1; a resampler or a codec may go a little beyond
# what decides the features, of an extractor like Whisper's
_SETTINGS = (
    *("feature_size", "sampling_rate", "hop_length", "n_fft", "n_samples"),
    *("padding_value", "padding_side", "dither"),
)


def check_extractor(extractor: Any, family: Family) -> None:
    """Raise ArgumentError for a feature extractor that is not of the family."""
    audio = family.audio
    if audio is None:
        if extractor is not None:
            raise ArgumentError(
                f"wrap_processor: {family.name} takes no audio. Fix: leave out feature_extractor"
            )
        return
    if extractor is None:
        return
    for name, own in (
        ("feature_size", audio.mel_bins),
        ("sampling_rate", audio.sampling_rate),
        ("hop_length", audio.hop_length),
    ):
        found = getattr(extractor, name, None)
        if found != own:
            raise ArgumentError(
                f"wrap_processor: feature_extractor.{name} is {found}, {family.name} has {own}. "
                "Fix: pass this family's feature extractor"
            )
    if getattr(extractor, "dither", 0.0):
        raise ArgumentError(
            "wrap_processor: feature_extractor.dither adds noise, so two passes never hear the same sound. "
            "Fix: set dither=0.0"
        )


def audio_settings(extractor: Any, audio: Audio) -> dict[str, Any] | None:
    """The audio part of `Sample.processor`: what decides features, their number, and where a video's sound lies."""
    if extractor is None:
        return None
    out = {name: getattr(extractor, name) for name in _SETTINGS if hasattr(extractor, name)}
    return out | {
        **dict(audio.options),
        "seconds_per_chunk": audio.seconds_per_chunk,
        "chunk_frames": audio.chunk_frames,
    }


def audio_medium(
    item: Any,
    extractor: Any,
    settings: dict[str, Any],
    family: Family,
    root: Path | None,
    cache: MediaCache,
    where: str,
) -> Medium:
    """An audio with features, content hash and cache key.

    `item`: (samples float [n], sampling rate), {"array": …, "sampling_rate": …}, bytes or a path of a file, which is
    resampled. Raises: ArgumentError, AudioError.
    """
    audio = family.audio
    assert audio is not None
    samples, known = _samples_of(item, audio.sampling_rate, root, where)
    content = audio_hash(samples, audio.sampling_rate)
    # the frames follow from content and settings
    seen = cache_key(content, (0, 0, 0), settings)
    done = cache.get(seen)
    if done is None:
        done = _processed(extractor, samples, audio, where)
        cache.put(seen, done)
    medium = Medium(
        media_id=f"audio:{content[:16]}",
        modality="audio",
        cache_key=cache_key(content, done.grid_thw, settings),
        grid_thw=done.grid_thw,
        num_tokens=family.tokens_of("audio", done.grid_thw),
        content_hash=content,
        sampling_rate=audio.sampling_rate,
        num_samples=len(samples),
        hop_length=audio.hop_length,
        **known,
    )
    medium.pixel_values = done.pixel_values
    if not medium.num_tokens:
        raise ArgumentError(
            f"{where}: {len(samples)} samples make {done.grid_thw[0]} feature frames, too few for one token. "
            "Fix: pass a longer audio"
        )
    return medium


def _processed(extractor: Any, samples: np.ndarray, audio: Audio, where: str) -> Processed:
    most = getattr(extractor, "n_samples", None)
    if dict(audio.options).get("truncation", True) and most is not None and len(samples) > most:
        seconds, heard = (n / audio.sampling_rate for n in (len(samples), most))
        raise ArgumentError(
            f"{where}: the audio has {seconds:g} s, and the feature extractor would drop all after {heard:g} s. "
            "Fix: pass at most that much, to engine and trainer alike, "
            "or give both an extractor with a larger chunk_length"
        )
    try:
        out = extractor(
            samples,
            sampling_rate=audio.sampling_rate,
            return_attention_mask=True,
            return_tensors="np",
            **dict(audio.options),
        )
    except (ValueError, RuntimeError) as error:  # fewer samples than a window
        why = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"{where}: the feature extractor refuses {len(samples)} samples ({why}). Fix: use another audio"
        ) from None
    held = np.asarray(out["attention_mask"][0], bool)
    features = np.asarray(out["input_features"][0], np.float32).T[held]
    return Processed((len(features), 1, 1), np.ascontiguousarray(features))


def _samples_of(
    item: Any, rate: int, root: Path | None, where: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """float32 [n], and Medium fields."""
    if isinstance(item, (bytes, bytearray, str, Path)):
        known: dict[str, Any] = {}
        if isinstance(item, (str, Path)):
            item, known["source"] = path_below(item, root, where)
        data = item if isinstance(item, (bytes, bytearray)) else item.read_bytes()
        known["file_hash"] = hashlib.sha256(data).hexdigest()
        return _checked(decode(data, rate)[0], where), known
    if isinstance(item, dict) and "array" in item:
        check_read(item, {"array", "sampling_rate", "path"}, where)
        item = (item.get("array"), item.get("sampling_rate"))
    if not (isinstance(item, tuple) and len(item) == 2):
        raise ArgumentError(
            f"{where}: {kind_of(item)} is not audio. "
            "Fix: pass (samples, sampling_rate), bytes, or a path below media_root"
        )
    array, given = item
    samples = np.asarray(array)
    if not samples.ndim:
        raise ArgumentError(
            f"{where}: the rate comes before the samples. Fix: pass (samples, sampling_rate)"
        )
    if given != rate:
        raise ArgumentError(
            f"{where}: the samples have a rate of {given!r:.40}, the model hears {rate} a second. "
            f"Fix: pass mp.audio.decode(file, sampling_rate={rate})"
        )
    if samples.dtype.kind != "f" or samples.ndim != 1 or not samples.size:
        raise ArgumentError(
            f"{where}: the samples have dtype {samples.dtype} and shape {list(samples.shape)}, expected floats "
            "[n] in one channel. Fix: pass mp.audio.decode(file)"
        )
    return _checked(np.ascontiguousarray(samples, np.float32), where), {}


def _checked(samples: np.ndarray, where: str) -> np.ndarray:
    """`samples`, if they are finite and of the usual range. Raises: ArgumentError."""
    loudest = float(np.abs(samples).max(initial=0))
    if not np.isfinite(loudest):
        raise ArgumentError(f"{where}: some samples are not finite. Fix: decode the file again")
    if loudest > _LOUDEST:
        raise ArgumentError(
            f"{where}: the samples reach {loudest:g}, expected -1 to 1. "
            "Fix: divide floats that were made of whole numbers by their range, 32768 for 16 bits"
        )
    return samples
