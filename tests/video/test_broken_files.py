"""Files that lie, are cut, or are no videos: one named error, in bounded time and memory."""

import io
import random
import re
import resource
import struct
import subprocess
import sys
import time

import av
import numpy as np
import pytest
from support.marked_clips import CODECS, clip, earlier, numbers_of, picture, sound_only

from mmpack.errors import VideoError
from mmpack.video import Limits, decode, probe

MIB = 1 << 20


def noise(count):
    """H.264 in MPEG-TS, with B-frames: a picture takes many packets of 188 bytes."""
    file, rng = io.BytesIO(), np.random.default_rng(0)
    with av.open(file, "w", format="mpegts") as out:
        stream = out.add_stream("libx264", rate=10, options={"bf": "3", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        for _ in range(count):
            frame = rng.integers(0, 255, (84, 112, 3), dtype=np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def refused(data, match):
    for call in (probe, lambda d: decode(d, [0])):
        with pytest.raises(VideoError, match=match) as caught:
            call(data)
        assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is empty"),
        (bytes(10_000), "can't be read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(1000), "can't be read"),
        (b"#EXTM3U\n#EXTINF:9,\n/etc/hostname\n", "can't be read"),
    ],
)
def test_not_a_video(data, match):
    refused(data, match)
    refused(sound_only(), "holds no video stream, only: audio")


def written(container, codec, **options):
    """60 frames of a codec that `clip` doesn't write."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for number in range(60):
            frame = av.VideoFrame.from_ndarray(picture(number, (128, 96)), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


class Pipe(io.BytesIO):
    """A file in which a writer can't go back."""

    def seekable(self):
        return False

    seek = None


def streamed(frames, container):
    file = Pipe()
    with av.open(io.BytesIO(clip(frames))) as source, av.open(file, "w", format=container) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux():
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    return file.getvalue()


CUTS = {
    "mp4": lambda: clip(60, options={"movflags": "faststart"}),
    "matroska": lambda: clip(60, container="matroska"),
    "avi": lambda: clip(60, container="avi"),
    "ogg": lambda: written("ogg", "libvpx", page_duration="200000"),
    "asf": lambda: written("asf", "wmv2"),
    "mpegts": lambda: clip(60, container="mpegts"),
    "flv": lambda: clip(60, container="flv"),
    "matroska, streamed": lambda: streamed(60, "matroska"),
    "avi, in parts": lambda: (
        clip(60, container="avi") + b"RIFF" + (9000).to_bytes(4, "little") + bytes(9000)
    ),
}


@pytest.mark.parametrize("container", CUTS)
@pytest.mark.parametrize("share", [0.6, 0.95])
def test_cut(container, share):
    whole = CUTS[container]()
    assert probe(whole).total_frames == 60
    refused(whole[: int(len(whole) * share)], "cut|can't be read")


def test_cuts_between_two_tags_and_files_that_were_streamed():
    """An FLV's metadata count its bytes, unless it was streamed; an ASF's data then has the length of a header."""
    whole = CUTS["flv"]()
    cut = whole[: -4 - int.from_bytes(whole[-4:])]
    refused(cut, f"the file has {len(cut)} of {len(whole)} bytes")
    avi, asf = clip(60, container="avi"), bytearray(CUTS["asf"]())
    header = int.from_bytes(asf[16:24], "little")
    asf[header + 16 : header + 24] = (50).to_bytes(8, "little")
    for data in (streamed(60, "flv"), avi[:4] + b"\xff" * 4 + avi[8:], bytes(asf)):
        assert probe(data).total_frames == 60
    mpegts = CUTS["mpegts"]()  # a cut between two packets can't be known
    assert probe(mpegts[: len(mpegts) // 2 // 188 * 188]).total_frames < 60


def test_mpegts_cut_within_its_last_picture():
    """Its packets don't say how long they are; threads would hide now and then that the last one is cut."""
    whole = noise(40)
    pictures = decode(whole, range(40))
    counts = {"right": 0, "refused": 0}
    for stop in range(len(whole) // 188 // 4, len(whole) // 188, 15):
        cut = whole[: stop * 188]
        try:
            found = decode(cut, range(probe(cut).total_frames))
        except VideoError:
            counts["refused"] += 1
        else:
            assert np.array_equal(found, pictures[: len(found)])
            counts["right"] += 1
    assert min(counts.values()) > 1, counts


@pytest.mark.parametrize("container", ["matroska", "flv"])
def test_times_before_0(container):
    """FFmpeg reads no time of them in Matroska, in FLV one of 24 days later."""
    assert probe(earlier(-200, container)).total_frames == 30
    refused(earlier(400, container), r"no usable time.*make_zero")


def test_intra_refresh():
    """x264 marks where a refresh begins as a keyframe; pictures are whole only a refresh later."""
    data = clip(60, options={"bf": "0", "x264-params": "intra-refresh=1:keyint=20"})
    assert numbers_of(decode(data, range(20))) == list(range(20))
    with pytest.raises(VideoError, match=r"frame 20 holds no picture.*encode it with keyframes"):
        decode(data, [20])
    with pytest.raises(VideoError, match=r"packet 40 .* marked as a keyframe.*Fix: encode it"):
        decode(data, [0, 58])


@pytest.mark.parametrize("codec", CODECS)
def test_random_damage(codec):
    """A damaged file gives its frames or a named error; nothing else, and not late."""
    rng, data = random.Random(codec), clip(codec=codec)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(25):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 3, 30))):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        start = time.monotonic()
        try:
            info = probe(bytes(broken), limits=Limits(max_pixels=1 << 20, max_frames=1000))
            out = decode(
                bytes(broken), range(min(info.total_frames, 30)), limits=Limits(1 << 20, 1000)
            )
            assert out.dtype == np.uint8
            outcomes["read"] += 1
        except VideoError as error:
            assert "\n" not in str(error) and "nan" not in str(error)
            assert "Fix: pass " in str(error) or "Fix: encode " in str(error)
            outcomes["refused"] += 1
        assert time.monotonic() - start < 20
    assert outcomes["refused"] >= 3


# ---- headers that promise gigabytes --------------------------------------------------------------


def _patched(data, box, offset, value):
    at = data.index(box) + 4 + offset
    return data[:at] + struct.pack(">I", value) + data[at + 4 :]


def _same_sizes(data, count):
    """All frames of one size, and `count` of them."""
    return _patched(_patched(_patched(data, b"stsz", 4, 1), b"stsz", 8, count), b"stts", 8, count)


def _frames_in_fragments(count):
    data = clip(4, options={"bf": "0"})
    trun = struct.pack(">I4sII", 16, b"trun", 0, count)
    tfhd = struct.pack(">I4sII", 16, b"tfhd", 0x020000, 1)
    traf = struct.pack(">I4s", 8 + len(tfhd + trun), b"traf") + tfhd + trun
    mfhd = struct.pack(">I4sII", 16, b"mfhd", 0, 1)
    return data + struct.pack(">I4s", 8 + len(mfhd + traf), b"moof") + mfhd + traf


BOMBS = {
        "two billion frames": (lambda: _same_sizes(clip(4), 0x7FFFFFFF), "its header counts"),
        "times of a billion frames": (lambda: _patched(clip(4), b"stts", 8, 1 << 30), "its header counts"),
        "a table larger than its box": (lambda: _patched(clip(4), b"stts", 4, 1 << 30), "more than it holds"),
        "fragments of frames without bytes": (lambda: _frames_in_fragments(170_000_000), "its header counts"),
        "a box beyond the end": (lambda: clip(4) + struct.pack(">I4s", 0x7FFFFFFF, b"moov"), "the file has"),
        "a compressed header": (lambda: clip(4) + struct.pack(">I4sI4s", 16, b"moov", 8, b"cmov"), "is compressed"),
        "65,500 × 65,500 pixels": (lambda: _huge("h264", 65500), "^read$|pixels|can't be read"),
}  # fmt: skip


def _huge(codec, side):
    """The size in the sample entry; FFmpeg may go by the stream, which knows better."""
    data = clip(4, codec=codec)
    at = data.index(b"avc1", data.index(b"stsd")) + 4 + 24
    return data[:at] + struct.pack(">HH", side, side) + data[at + 4 :]


LIMITED = """
import resource, sys
sys.path[:0] = {path!r}
from mmpack.video import decode, probe
from mmpack.errors import VideoError
import av, mmpack.video.decoding, mmpack.video.info
data = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for call in (probe, lambda d: decode(d, [0, 1])):
    try:
        call(data)
        print("read")
    except VideoError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, tmp_path):
    make, match = BOMBS[name]
    path = tmp_path / "bomb"
    path.write_bytes(make())
    code = LIMITED.format(path=[p for p in sys.path if p])
    limit = (4096 * MIB, 4096 * MIB)
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    *lines, grown = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert all(re.search(match, line) for line in lines), lines
    assert len(lines) == 2 and int(grown) < 200  # MiB
