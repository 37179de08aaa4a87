"""`decode`: the frames that were asked for, known by the number in each picture, and no more work than they need."""

import io
import multiprocessing

import av
import numpy as np
import pytest
from support.marked_clips import CODECS, clip, number_of, numbers_of, picture

from mmpack.errors import ArgumentError, BackendError, VideoError
from mmpack.video import Limits, decode
from mmpack.video.backends import pyav
from mmpack.video.files.container import Opened, opened
from mmpack.video.files.packets import read_packets

CLIPS = {
    **{codec: {"codec": codec} for codec in CODECS},
    "B-frames, one keyframe": {"gop": 100, "options": {"bf": "3", "b-pyramid": "normal"}},
    "open GOPs": {"options": {"x264-params": "open-gop=1"}},
    "open GOPs, HEVC": {"codec": "hevc", "options": {"x265-params": "log-level=none:open-gop=1:keyint=12"}},
    "only keyframes": {"gop": 1},
    "Matroska": {"container": "matroska"},
    "transport stream": {"container": "mpegts"},
    "Flash": {"container": "flv"},
    "AVI, times guessed": {"container": "avi"},
    "with sound": {"sound": True},
    "variable": {"times": [7 * n * n for n in range(30)]},
    "turned": {"rotation": 90},
}  # fmt: skip


@pytest.mark.parametrize("name", CLIPS)
def test_the_frames_asked_for_are_those_of_a_whole_decode(name):
    data, rng = clip(**CLIPS[name]), np.random.default_rng(0)
    with av.open(io.BytesIO(data)) as container:
        every = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    turned = np.rot90(every, -CLIPS[name].get("rotation", 0) // 90, axes=(1, 2))
    for frames in ([29, 3, 3, 17], *(rng.integers(0, 30, n).tolist() for n in (1, 8))):
        found = decode(data, frames)
        np.testing.assert_array_equal(found, turned[frames])
        assert numbers_of(found) == frames


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_pictures_are_upright(rotation):
    out = decode(clip(rotation=rotation), [5])[0]
    assert np.abs(out.astype(int) - picture(5, (128, 96))).mean() < 12


def test_colours_follow_the_stream():
    """bt601 and bt709, limited and full range: the same picture, since each file says what it is."""
    made = [
        clip(4, colours=colours, options={"crf": "1"})
        for colours in ((5, 1), (1, 1), (5, 2), (1, 2))
    ]
    outs = [decode(data, [2])[0].astype(int) for data in made]
    assert len(set(made)) == 4
    for out in outs:
        assert np.abs(out - picture(2, (128, 96))).mean() < 4


@pytest.mark.parametrize("extra", [{"pix_fmt": "yuv420p10le"}, {"codec": "vp9", "size": (131, 99)}])
def test_ten_bits_and_odd_sizes(extra):
    out = decode(clip(8, **extra), [6])
    assert out.dtype == np.uint8 and number_of(out[0]) == 6
    assert out.shape[1:3] == extra.get("size", (128, 96))[::-1]


class Counting:
    """An av.VideoStream that counts the pictures that it decodes."""

    def __init__(self, stream):
        self.stream, self.decoded = stream, 0

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def decode(self, packet):
        pictures = self.stream.decode(packet)
        self.decoded += len(pictures)
        return pictures


class Container:
    """An av container that takes the Counting stream for its own."""

    def __init__(self, container):
        self.container = container

    def seek(self, time, stream):
        self.container.seek(time, stream=stream.stream)

    def demux(self, stream):
        return self.container.demux(stream.stream)


@pytest.mark.parametrize(
    ("frames", "count"), [([0], 1), ([25], 6), ([3, 55], 4 + 6), ([21, 22, 29], 10)]
)
def test_only_what_is_needed_is_decoded(frames, count):
    data = clip(60, gop=10, options={"bf": "0"})
    with opened(data, Limits()) as video:
        packets = read_packets(video, Limits())
        stream = Counting(video.stream)
        counted = Opened(Container(video.container), stream, video.where)
        pixels = pyav.decode(data, counted, packets, np.array(frames), threads=1)
    assert numbers_of(pixels) == frames
    assert stream.decoded == count


def test_a_repeated_frame_is_decoded_once():
    data, one = clip(60, gop=10, options={"bf": "0"}), 128 * 96
    limits = Limits(max_decoded_pixels=6 * one)
    assert numbers_of(decode(data, [25, 25, 25], limits=limits)) == [25] * 3
    with pytest.raises(VideoError, match=r"7 frames .* would have to be decoded"):
        decode(data, [26, 25], limits=limits)


def test_threads_are_bounded(monkeypatch):
    threads, seen = 3, []
    real = pyav.decode

    def spy(source, video, *rest):
        seen.append(video.stream.codec_context.thread_count)
        return real(source, video, *rest)

    monkeypatch.setattr(pyav, "decode", spy)
    one = decode(clip(), [3, 20], threads=1)
    np.testing.assert_array_equal(decode(clip(), [3, 20], threads=threads), one)
    assert seen == [1, threads]


@pytest.mark.parametrize("frames", [[], [30], [-1], [0.5], [[1]], [True]])
def test_frames_that_make_no_sense(frames):
    with pytest.raises(ArgumentError, match="Fix: ") as caught:
        decode(clip(), frames)
    assert "\n" not in str(caught.value)


def test_backends_by_name():
    with pytest.raises(ArgumentError, match="Fix: use auto, pyav, torchcodec, decord"):
        decode(clip(), [0], backend="opencv")
    with pytest.raises(BackendError, match=r"decord is exact on h264, and this is vp9. Fix: "):
        decode(clip(codec="vp9"), [0], backend="decord")
    np.testing.assert_array_equal(decode(clip(), [7], backend="pyav"), decode(clip(), [7]))
    with pytest.raises(ArgumentError, match=r"threads: 0\. Fix: pass 1 to 64"):
        decode(clip(), [0], threads=0)


def test_a_limit_for_each_cost():
    data = clip(60, gop=100)
    pixels = 128 * 96
    decode(data, [9], limits=Limits(pixels, 60, 12 * pixels, 3 * pixels))
    for limits, what in [
        (Limits(max_pixels=pixels - 1), "128×96"),
        (Limits(max_frames=59), "60 frames, more than 59"),
        (Limits(max_decoded_pixels=9 * pixels), "would have to be decoded"),
        (Limits(max_bytes=3 * pixels - 1), "take more than"),
    ]:
        with pytest.raises(VideoError, match=f"{what}.*Fix: ") as caught:
            decode(data, [9], limits=limits)
        assert "\n" not in str(caught.value)


def _in_child(data, queue):
    queue.put(numbers_of(decode(data, [0, 11, 29])))


def test_workers():
    data = clip()
    decode(data, [3], threads=2)  # the parent has had decoder threads
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_in_child, args=(data, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=120) for _ in workers] == [[0, 11, 29]] * 2
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0


def test_a_picture_of_another_size():
    """VP9's keyframes bring their own size: the packets of two clips, in one stream."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as out:
        stream = None
        for part, size in enumerate([(128, 96), (160, 96)]):
            with av.open(io.BytesIO(clip(4, codec="vp9", size=size))) as container:
                stream = stream or out.add_stream_from_template(container.streams.video[0])
                for packet in container.demux(video=0):
                    if packet.size:
                        packet.pts = packet.dts = packet.pts + 160 * part
                        packet.stream = stream
                        out.mux(packet)
    with pytest.raises(VideoError, match=r"frame 5 is 160×96, but others are 128×96. Fix: "):
        decode(file.getvalue(), [1, 5])
    with pytest.raises(VideoError, match="Fix: "):  # the decoder itself refuses the larger one
        decode(file.getvalue(), [5], limits=Limits(max_pixels=128 * 96))
