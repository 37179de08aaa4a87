"""Files of sound (WAV, AIFF, FLAC, Ogg, MP3; by libsndfile) to samples float32 [n], resampled by soxr.

The rate, the mean over channels and the resampling are librosa.load's, which transformers' processors use.
"""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.audio.whole import FORMATS, what_is_missing
from mmpack.errors import ArgumentError, AudioError, check_flag, check_whole, kind_of, require

Source = bytes | bytearray | str | os.PathLike[str]
_BLOCK = 1 << 20  # frames that are read at a time
_MOST_RATE = 768_000


@dataclass(frozen=True)
class Limits:
    """Checked against the header first, and again while reading: a header may lie."""

    max_file_bytes: int = 1 << 30
    max_samples: int = 1 << 28  # of all channels together: 93 minutes of 48 kHz stereo
    max_channels: int = 64


def decode(
    source: Source,
    sampling_rate: int | None = None,
    mono: bool = True,
    limits: Limits | None = None,
) -> tuple[np.ndarray, int]:
    """Samples of a file, and their rate in samples per second.

    Args:
        source: bytes of a file, or its path.
        sampling_rate: that of the samples returned; by default the file's own.
        mono: the mean over channels, float32 [n]; else float32 [channels, n].

    A file that lacks samples which its container counts, or holds more, is refused. A cut can't be known of a WAV, AIFF
    or FLAC that was streamed and counts none, nor between two frames of an MP3 without a Xing header.

    Raises: AudioError for what is no sound, is cut, or is larger than `limits`; ArgumentError for a path that can't be
    read; MissingExtraError without soundfile, or without soxr where the rate changes.
    """
    check_flag("audio.decode", "mono", mono)
    if sampling_rate is not None:
        check_whole("audio.decode", "sampling_rate", sampling_rate)
    limits = Limits() if limits is None else limits
    where = _name_of(source)
    data = _bytes_of(source, limits, where)
    samples, rate = _read(data, limits, where)
    if mono:
        samples = samples.mean(axis=0)
    if sampling_rate is None or sampling_rate == rate:
        return np.ascontiguousarray(samples, np.float32), rate
    if samples.size * sampling_rate / rate > limits.max_samples:
        raise _too_large(where, "makes too many samples at the requested rate", limits)
    return _resampled(samples, rate, sampling_rate), sampling_rate


def _read(data: bytes, limits: Limits, where: str) -> tuple[np.ndarray, int]:
    """float32 [channels, n] and the rate."""
    soundfile = require("soundfile", "audio", where)
    blocks, count = [], 0
    fix = "pass a whole WAV, FLAC, Ogg or MP3 file (of others, ffmpeg -i IN OUT.wav makes one)"
    try:
        held = io.BytesIO(data)
        with soundfile.SoundFile(held) as file:
            rate, channels = int(file.samplerate), int(file.channels)
            if not 0 < rate <= _MOST_RATE or channels > limits.max_channels:
                raise _too_large(where, f"has {channels} channels at {rate} Hz", limits)
            kind, frames = str(file.format), int(file.frames)
            if kind not in FORMATS:
                raise AudioError(f"{where} is {kind}, which is not read. Fix: {fix}")
            if frames > 1 << 62:  # a FLAC that was streamed: libsndfile can't seek to its end
                file.seekable, frames = (lambda: False), 0
            if frames * channels > limits.max_samples:
                raise _too_large(where, f"has {frames} samples in {channels} channels", limits)
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                blocks.append(block)
                count += block.size
                if count > limits.max_samples:
                    raise _too_large(where, "holds more samples than its header says", limits)
            end = held.tell()
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError, TypeError) as error:
        if isinstance(error, AudioError):
            raise
        why = " ".join(str(getattr(error, "error_string", error)).split())[:200].rstrip(".")
        raise AudioError(f"{where} can't be read ({why}). Fix: {fix}") from None
    if not count:
        raise AudioError(f"{where} holds no samples. Fix: {fix}")
    missing = what_is_missing(data, kind, frames, count // channels, end)
    if missing:
        raise AudioError(
            f"{where} {missing}. Fix: pass the whole file, of one sound; if this is all of it, "
            "write it anew with ffmpeg -i IN -c copy OUT"
        )
    samples = np.concatenate(blocks).T
    if not np.isfinite(samples).all():
        raise AudioError(
            f"{where} holds samples that are not finite. Fix: encode it again from its source"
        )
    return samples, rate


def _resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """float32 [..., ceil(n · wanted / rate)]."""
    soxr = require("soxr", "audio", "resampling")
    made: Any = soxr.resample(samples.T, rate, wanted, quality="HQ").T
    length = int(np.ceil(samples.shape[-1] * float(wanted) / rate))
    missing = [(0, 0)] * (made.ndim - 1) + [(0, max(0, length - made.shape[-1]))]
    return np.ascontiguousarray(np.pad(made[..., :length], missing), np.float32)


def _bytes_of(source: Source, limits: Limits, where: str) -> bytes:
    if isinstance(source, (bytes, bytearray)):
        data = bytes(source)
    else:
        try:
            about = os.stat(source)
            if not stat.S_ISREG(about.st_mode):
                raise ArgumentError(f"{where} is not a file. Fix: pass a file, or its bytes")
            if about.st_size > limits.max_file_bytes:
                raise _too_large(where, f"has {about.st_size} bytes", limits)
            with Path(source).open("rb") as file:
                data = file.read(limits.max_file_bytes + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, (ArgumentError, AudioError)):
                raise
            why = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
            raise ArgumentError(
                f"{where} can't be read ({why}). Fix: check the path and its permissions"
            ) from None
    if len(data) > limits.max_file_bytes:
        raise _too_large(where, f"has more than {limits.max_file_bytes} bytes", limits)
    if not data:
        raise AudioError(f"{where} is empty. Fix: pass an audio file")
    return data


def _name_of(source: Any) -> str:
    if isinstance(source, (bytes, bytearray)):
        return f"audio ({len(source)} bytes)"
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(
            f"audio: {kind_of(source)} is not a file. Fix: pass the bytes of a file, or its path"
        )
    return f"audio {os.path.basename(os.fspath(source))[-80:]!a}"


def _too_large(where: str, what: str, limits: Limits) -> AudioError:
    return AudioError(
        f"{where} {what}, beyond {limits}. Fix: pass a shorter piece, or wider audio.Limits"
    )
