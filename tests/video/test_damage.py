"""Damage that a decoder may not report, fields, several streams, pipes, full disks: an error, or the same pixels."""

import io
import os
import random
import resource
import shutil
import threading
from contextlib import contextmanager

import av
import numpy as np
import pytest
from support.marked_clips import clip, numbers_of, picture, with_hidden_frames

from mmpack.errors import ArgumentError, BackendError, VideoError
from mmpack.video import FrameCache, decode, probe
from mmpack.video.files.interlaced import may_be_interlaced

FRAMES = 30


def flipped(data, seed):
    """One to three bits of the pictures."""
    rng, out = random.Random(seed), bytearray(data)
    start = data.index(b"mdat") + 800
    stop = data.index(b"moov") if data.index(b"moov") > start else len(data)
    for _ in range(rng.choice((1, 3))):
        out[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    return bytes(out)


def outcome(data, frames=range(FRAMES)):
    try:
        return decode(data, frames, threads=4)
    except VideoError as error:
        assert "Fix: " in str(error) and "\n" not in str(error)
        return None


def test_damaged_hevc_is_refused_or_the_same_at_each_call():
    data = clip(FRAMES, "hevc", size=(256, 192), gop=15)
    clean, seen = decode(data, range(FRAMES)), {"refused": 0, "read": 0}
    for seed in range(12):
        broken = flipped(data, seed)
        first = outcome(broken)
        seen["refused" if first is None else "read"] += 1
        for _ in range(2):
            again = outcome(broken)
            assert (first is None) == (again is None), seed
            assert first is None or np.array_equal(first, again), seed
    assert min(seen.values()) > 1, seen
    np.testing.assert_array_equal(decode(data, range(FRAMES), threads=8), clean)


def same_with_any_threads(data, frames, flips, tries, damaged):
    """Bits flipped within `damaged`: each try gives the same pixels, or none, with any number of threads."""
    rng, read = random.Random(0), 0
    for _ in range(tries):
        broken = bytearray(data)
        for _ in range(flips):
            broken[rng.randrange(*damaged)] ^= 1 << rng.randrange(8)
        seen = []
        for threads in (1, 2, 8):
            try:
                seen.append(decode(bytes(broken), range(frames), threads=threads).tobytes())
            except (VideoError, ArgumentError):  # ArgumentError: frames are gone
                seen.append(b"")
        assert len(set(seen)) == 1
        read += seen[0] != b""
    assert read > 2


def test_damage_in_hidden_pictures_gives_the_same_pixels_with_any_threads():
    """FFmpeg drops hidden pictures and does not report which were broken; later ones refer to them."""
    video = with_hidden_frames(20, gop=30)
    start = video.index(b"mdat")
    same_with_any_threads(video, 10, 3, 25, (start + 2000, start + len(video) // 2))


# ---- what named backends would get wrong ---------------------------------------------------------


def interlaced():
    return clip(FRAMES, options={"x264-params": "interlaced=1"})


def two_streams():
    """Two videos of equal length, the smaller one first and by default."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        streams = [out.add_stream("libx264", rate=25) for _ in range(2)]
        for stream, size in zip(streams, ((128, 96), (256, 192)), strict=True):
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for n in range(FRAMES):
            for k, stream in enumerate(streams):
                pixels = picture(n + 100 * k, (stream.width, stream.height))
                out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for stream in streams:
            out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"profile": "baseline", "bf": "0"},
        {"x264-params": "cqm=jvt"},
        {"x264-params": "interlaced=1"},
        {"x264-params": "tff=1:cqm=jvt"},
    ],
)
def test_fields_are_seen_in_the_header(options):
    data = clip(4, options=options, container="matroska")
    with av.open(io.BytesIO(data)) as file:
        (stream,) = file.streams.video
        extradata = stream.codec_context.extradata
        interlaced = next(file.decode(stream)).interlaced_frame
    assert may_be_interlaced(extradata) == interlaced
    assert may_be_interlaced(None) and may_be_interlaced(extradata[:9])


@pytest.mark.decoders
@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
def test_fields_are_refused_by_name(backend, tmp_path):
    cache = FrameCache(tmp_path, 1 << 28)
    want = decode(interlaced(), range(FRAMES), cache=cache)
    with pytest.raises(BackendError, match=r"interlaced.+Fix: pass backend='auto'"):
        decode(interlaced(), range(FRAMES), backend=backend, cache=cache)
    np.testing.assert_array_equal(decode(interlaced(), range(FRAMES), cache=cache), want)


@pytest.mark.decoders
def test_the_refusal_of_fields_is_not_for_nothing():
    from torchcodec.decoders import VideoDecoder

    theirs = VideoDecoder(interlaced(), dimension_order="NHWC").get_frames_in_range(0, FRAMES)
    assert not np.array_equal(theirs.data.numpy(), decode(interlaced(), range(FRAMES)))


@pytest.mark.decoders
def test_several_streams():
    import decord

    want = decode(two_streams(), [3, 7])
    assert numbers_of(want) == [3, 7]
    assert decord.VideoReader(io.BytesIO(two_streams()))[0].shape != want[0].shape
    with pytest.raises(BackendError, match="takes another of several video streams"):
        decode(two_streams(), [3, 7], backend="decord")
    np.testing.assert_array_equal(decode(two_streams(), [3, 7], backend="torchcodec"), want)


@pytest.mark.decoders
@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
def test_a_library_that_fails_on_a_whole_file_is_a_backend_error(backend, monkeypatch):
    import decord
    from torchcodec import decoders

    def broken(*args, **kwargs):
        raise RuntimeError("no memory for threads")

    monkeypatch.setattr(decoders, "VideoDecoder", broken)
    monkeypatch.setattr(decord, "VideoReader", broken)
    with pytest.raises(BackendError, match=r"can't decode it .no memory.*Fix: pass backend='auto'"):
        decode(clip(), [0], backend=backend)


@pytest.mark.decoders
def test_a_cache_keeps_what_each_library_decoded(tmp_path):
    cache = FrameCache(tmp_path, 1 << 28)
    for backend in ("pyav", "decord", "torchcodec"):
        decode(clip(), [0, 1], backend=backend, cache=cache)
    assert cache.stats.misses == 3
    decode(clip(), [0, 1], cache=cache)
    assert cache.stats.hits == 1


# ---- files that are none, disks that are full ----------------------------------------------------


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "clip.mp4")
    done = []

    def run(call):
        with pytest.raises(ArgumentError, match=r"is not a file .*Fix: pass a file, or its bytes"):
            call(tmp_path / "clip.mp4")
        done.append(call)

    for call in (probe, lambda path: decode(path, [0])):
        thread = threading.Thread(target=run, args=(call,), daemon=True)
        thread.start()
        thread.join(20)
        assert done[-1:] == [call]
    with pytest.raises(ArgumentError, match="is not a file"):
        probe("/dev/zero")


@contextmanager
def files_of_at_most(count):
    """Writing more bytes into a file fails midway, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_no_sample(tmp_path):
    cache, data = FrameCache(tmp_path, 1 << 28), clip()
    with files_of_at_most(4096):
        with pytest.warns(RuntimeWarning, match=r"File too large.*Fix: make room"):
            assert numbers_of(decode(data, [4], cache=cache)) == [4]
        assert numbers_of(decode(data, [5], cache=cache)) == [5]  # and warns no more
    assert cache.stats.unwritten == 2
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.frames"))
    shutil.rmtree(tmp_path / "locks")  # nor does a lost folder of locks
    assert numbers_of(decode(data, [4], cache=cache)) == [4]


def test_other_formats_are_told_which_are_read():
    file = io.BytesIO()
    with av.open(file, "w", format="gif") as out:
        stream = out.add_stream("gif", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "rgb8"
        for n in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 40 * n, np.uint8), "rgb24")
            out.mux(stream.encode(frame.reformat(format="rgb8")))
        out.mux(stream.encode())
    match = r"Fix: pass a whole file of MP4, QuickTime, Matroska.* or IVF"
    with pytest.raises(VideoError, match=match):
        probe(file.getvalue())
