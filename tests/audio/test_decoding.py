"""Files of sound to samples: against the samples written, the sine that was sampled, and hostile bytes."""

from __future__ import annotations

import io
import re
import struct
import wave

import av
import numpy as np
import pytest
import soundfile

import mmpack as mp
from mmpack.audio import Limits, decode
from mmpack.audio.whole import ogg_ends


def sine(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def as_wav(samples: np.ndarray, rate: int) -> bytes:
    """16-bit PCM by Python's own writer. samples [n] or [n, channels]."""
    samples = samples[:, None] if samples.ndim == 1 else samples
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((samples.shape[1], 2, rate, 0, "NONE", ""))
        out.writeframes((samples * 32768).round().clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def test_samples_are_those_written(tmp_path):
    samples = sine(22_050)
    data = as_wav(samples, 22_050)
    found, rate = decode(data)
    assert rate == 22_050 and found.dtype == np.float32
    np.testing.assert_allclose(found, samples, atol=2 / 32768)
    (tmp_path / "a.wav").write_bytes(data)
    assert np.array_equal(decode(tmp_path / "a.wav")[0], found)


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_resampled_is_the_sine_at_the_other_rate(rate):
    found, made = decode(as_wav(sine(rate), rate), sampling_rate=16_000)
    wanted = sine(16_000)
    assert made == 16_000 and len(found) == len(wanted)
    inner = slice(400, -400)  # the filter's edges
    np.testing.assert_allclose(found[inner], wanted[inner], atol=2e-3)


def test_channels():
    both = np.stack([sine(16_000), -0.5 * sine(16_000)], axis=1)
    data = as_wav(both, 16_000)
    np.testing.assert_allclose(decode(data)[0], both.mean(axis=1), atol=2 / 32768)
    kept, _ = decode(data, mono=False)
    assert kept.shape == (2, 8_000)
    assert decode(data, sampling_rate=8_000, mono=False)[0].shape == (2, 4_000)


def _wav(frames: int, channels: int = 1, rate: int = 16_000, data: bytes = b"\0" * 64) -> bytes:
    """A header that claims `frames`, before `data`."""
    size = min(frames * channels * 2, 2**32 - 1)
    head = struct.pack(
        "<HHIIHH", 1, channels, rate, min(rate * channels * 2, 2**32 - 1), channels * 2 % 2**16, 16
    )
    riff = struct.pack("<4sI4s4sI", b"RIFF", 36, b"WAVE", b"fmt ", 16)
    return riff + head + struct.pack("<4sI", b"data", size) + data


HOSTILE = {
    "empty": b"",
    "cut": as_wav(sine(16_000), 16_000)[:30],
    "no samples": as_wav(np.zeros(0), 16_000),
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(99),
    "many channels": _wav(100, channels=1000),
    "no rate": _wav(100, rate=0),
    "high rate": _wav(100, rate=2**31),
    "ogg": b"OggS" + b"\0" * 99,
    "mp3": b"ID3" + b"\xff" * 99,
    "a video": b"\0\0\0\x18ftypisom" + bytes(99),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_line(name):
    with pytest.raises(mp.errors.AudioError) as error:
        decode(HOSTILE[name], sampling_rate=16_000)
    assert "\n" not in str(error.value) and "Fix: " in str(error.value)


def test_limits_and_arguments():
    data = as_wav(sine(16_000), 16_000)
    for match, sound, options in (
        ("has 8000 samples", data, {"limits": Limits(max_samples=7_999)}),
        (
            "too many samples at the requested rate",
            data,
            {"sampling_rate": 768_000, "limits": Limits(max_samples=8_000)},
        ),
        ("more than 100 bytes", data, {"limits": Limits(max_file_bytes=100)}),
        ("was cut: it lacks 199999000 bytes that its header", _wav(10**8, data=b"\1\0" * 500), {}),
        ("is AU, which is not read", written("AU", NOISE), {}),
    ):
        with pytest.raises(mp.errors.AudioError, match=match):
            decode(sound, **options)
    for source, options in (
        (data, {"sampling_rate": 1.5}),
        (data, {"mono": "yes"}),
        (7, {}),
        ("nowhere.wav", {}),
    ):
        with pytest.raises(mp.ArgumentError, match="Fix: "):
            decode(source, **options)


def written(format: str, samples: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=format, **options)
    return file.getvalue()


NOISE = 0.1 * np.random.default_rng(0).standard_normal(40_001)
FORMATS = ["WAV", "WAVEX", "RF64", "AIFF", "FLAC", "OGG", "MP3"]
UNCUT = {name: written(name, NOISE) for name in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_file_that_was_cut_is_refused(format, kept):
    whole = UNCUT[format]
    found = decode(whole)[0]
    assert len(found) == len(NOISE)
    if format not in ("OGG", "MP3"):
        np.testing.assert_allclose(found, NOISE, atol=2 / 32768)
    with pytest.raises(mp.errors.AudioError, match=r"was cut|can't be read|holds no samples"):
        decode(whole[: int(kept * len(whole))])


def test_sounds_without_a_length_are_read_whole():
    """As a pipe writes them, which can't go back: no length can be compared."""
    for size in (2**32 - 1, 2**31 - 1, 0x7FFFF000):
        data = bytearray(as_wav(sine(16_000), 16_000))
        data[4:8], data[40:44] = struct.pack("<I", 2**32 - 1), struct.pack("<I", size)
        assert len(decode(bytes(data))[0]) == 8_000
    odd = written("WAV", NOISE[:30_001], subtype="PCM_U8")  # a byte of padding
    assert len(decode(odd)[0]) == 30_001
    assert len(decode(UNCUT["WAV"] + b"LIST\x88\x13\0\0cut")[0]) == len(NOISE)


def frames_of_mp3(data: bytes) -> list[int]:
    """Where each frame begins, and the file's end: MPEG-2 layer III of libsndfile, by its own table."""
    rates = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)  # kbit/s
    at, found = 0, []
    while at < len(data):
        assert data[at] == 0xFF and data[at + 1] & 0xFE == 0xF2
        found.append(at)
        at += 72 * 1000 * rates[(data[at + 2] >> 4) - 1] // 16_000 + (data[at + 2] >> 1 & 1)
    return [*found, at]


def test_mp3s_are_counted_frame_by_frame():
    loud = np.concatenate([0.3 * NOISE, np.zeros(160_000)])  # by its first frame it seems shorter
    whole = written("MP3", loud, bitrate_mode="VARIABLE")
    starts = frames_of_mp3(whole)
    for cut in (starts[-3], starts[20]):  # between two frames
        with pytest.raises(mp.errors.AudioError, match=r"frames that its header counts"):
            decode(whole[:cut])
    tagged = b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + whole + b"TAG" + bytes(125)
    assert len(decode(tagged)[0]) == len(loud)
    headless = whole[starts[1] :]  # without the frame of the Xing header
    with pytest.raises(mp.errors.AudioError, match=r"can't be read whole: its frames hold"):
        decode(headless)
    with pytest.raises(mp.errors.AudioError, match=r"can't be read whole: its frames hold"):
        decode(whole + whole)


def counting_less(format: str, samples: int = 4_000) -> bytes:
    data = bytearray(UNCUT[format])
    if format == "WAV":
        data[40:44] = struct.pack("<I", 2 * samples)
    else:
        data[22:26] = struct.pack(">I", samples)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        *(UNCUT[name] * 2 for name in ("OGG", "FLAC", "RF64")),
        UNCUT["OGG"] + written("OGG", NOISE[:999]),  # the whole rest is read ahead
        counting_less("WAV"),
        counting_less("FLAC"),
    ],
)
def test_half_a_sound_is_refused(data):
    """Of chained files the first was read, and of others what the header counts."""
    with pytest.raises(mp.errors.AudioError, match=r"holds \d+ bytes behind what is read"):
        decode(data)


@pytest.mark.parametrize("format", ["WAV", "AIFF", "FLAC", "OGG"])
@pytest.mark.parametrize("more", [bytes(500), b"TAG" + bytes(125)])
def test_what_follows_and_is_no_sound(format, more):
    if (format, more[:1]) in (("WAV", b"\0"), ("AIFF", b"\0")):  # may be silence
        with pytest.raises(mp.errors.AudioError, match="500 bytes behind"):
            decode(UNCUT[format] + more)
    else:
        assert len(decode(UNCUT[format] + more)[0]) == len(NOISE)


@pytest.mark.parametrize("page", [1, 2])
def test_ogg_ends_with_its_flag(page):
    """Also where a cut falls between two pages; a video's container asks the same."""
    from mmpack.errors import VideoError
    from mmpack.video.files.header import check_header

    whole = UNCUT["OGG"]
    pages = [m.start() for m in re.finditer(b"OggS", whole)]
    cut = whole[: pages[-page]]
    with pytest.raises(
        mp.errors.AudioError, match=r"was cut: its last page has no end-of-stream flag"
    ):
        decode(cut)
    check_header(io.BytesIO(whole), len(whole), 10, "here")
    with pytest.raises(VideoError, match="here: a stream's last page has no end-of-stream flag"):
        check_header(io.BytesIO(cut), len(cut), 10, "here")


def test_the_end_of_each_stream_of_an_ogg():
    """FLAC, and VP8 that ends first."""
    file = io.BytesIO()
    with av.open(file, "w", format="ogg", options={"page_duration": "200000"}) as out:
        sound, video = out.add_stream("flac", rate=16_000, layout="mono"), out.add_stream("libvpx")
        video.width = video.height = 32
        for at in range(0, 64_000, 4_000):
            samples = np.full((1, 4_000), at % 999, np.int16)
            frame = av.AudioFrame.from_ndarray(samples, "s16", "mono")
            frame.sample_rate, frame.pts = 16_000, at
            out.mux(sound.encode(frame))
            if at < 8_000:
                picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")
                out.mux(video.encode(picture))
        out.mux(video.encode())
        out.mux(sound.encode())
    whole = file.getvalue()
    assert ogg_ends(io.BytesIO(whole)) and ogg_ends(io.BytesIO(whole + b"\0" * 99))
    cuts = np.random.default_rng(0).integers(0, len(whole) - 1, 99).tolist()
    assert not any(ogg_ends(io.BytesIO(whole[:at])) for at in [*cuts, len(whole) - 1])


def test_a_flac_that_was_streamed():
    whole = bytearray(UNCUT["FLAC"])
    whole[21] &= 0xF0  # STREAMINFO's number of samples, 36 bits
    whole[22:26] = bytes(4)
    assert np.array_equal(decode(bytes(whole))[0], decode(UNCUT["FLAC"])[0])
    with pytest.raises(mp.errors.AudioError, match="can't be read"):
        decode(bytes(whole[: len(whole) // 2]))
