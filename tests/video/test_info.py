"""`probe`: what a file says of itself, against how it was made."""

import hashlib

import numpy as np
import pytest
from support.marked_clips import CODECS, clip, numbers_of, with_hidden_frames

from mmpack.errors import ArgumentError, VideoError
from mmpack.video import decode, probe


@pytest.mark.parametrize("codec", CODECS)
def test_codecs(codec):
    data = clip(codec=codec)
    info = probe(data)
    assert (info.width, info.height, info.rotation, info.codec) == (128, 96, 0, codec)
    assert (info.fps, info.total_frames, info.variable) == (25.0, 30, False)
    assert info.duration == pytest.approx(1.2)
    np.testing.assert_allclose(info.timestamps, np.arange(30) / 25, atol=1e-9)
    assert info.content_key == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("container", "rotation"), [("mp4", 90), ("mp4", 180), ("matroska", 270)])
def test_sizes_are_upright(rotation, container):
    info = probe(clip(rotation=rotation, container=container))
    assert (info.width, info.height, info.rotation) == (128, 96, rotation)
    with pytest.raises(VideoError, match="mirrors"):
        probe(clip(2, mirrored=True))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize(
    ("times", "variable"),
    [
        ([0, 40, 50, 300, 310, 900], True),
        ([2000, 2040, 2080, 2120], False),  # begins late
        ([0, 33, 67, 100, 133, 167], False),  # 30 a second, rounded to milliseconds
    ],
)
def test_times(container, times, variable):
    info = probe(clip(len(times), times=times, container=container))
    np.testing.assert_allclose(info.timestamps, (np.array(times) - times[0]) / 1000, atol=1e-9)
    assert info.variable == variable
    assert info.duration > info.timestamps[-1]


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "avi"])
@pytest.mark.parametrize("frames", [1, 7])
def test_short_clips(container, frames):
    data = clip(frames, container=container)
    info = probe(data)
    assert info.total_frames == len(info.timestamps) == frames
    assert numbers_of(decode(data, range(frames))) == list(range(frames))


def test_no_rate():
    data = clip(1, container="matroska")
    at = data.index(b"\x23\xe3\x83\x84")  # the duration of a frame, made a void element
    info = probe(data[:at] + b"\xec\x86" + data[at + 2 :])
    assert info.fps is None and info.total_frames == 1


def test_frames_that_an_edit_list_hides():
    hidden = with_hidden_frames(10, gop=100, options={"bf": "0"})
    info = probe(hidden)
    assert info.total_frames == 20 and info.timestamps[0] == 0
    assert numbers_of(decode(hidden, range(20))) == list(range(10, 30))


def test_paths(tmp_path):
    path = tmp_path / "a:b.mp4"  # no protocol is seen in a path
    path.write_bytes(clip())
    assert probe(path).content_key == probe(clip()).content_key == probe(str(path)).content_key
    for gone in (tmp_path / "none.mp4", "http://127.0.0.1:9/clip.mp4"):
        with pytest.raises(ArgumentError, match="Fix: check the path and its permissions"):
            probe(gone)
    with pytest.raises(ArgumentError, match="not a video"):
        probe(3)
