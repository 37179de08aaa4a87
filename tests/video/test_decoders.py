"""decord and torchcodec against PyAV: the same bytes, or a refusal that says why. Needs constraints/together.txt."""

import io

import numpy as np
import pytest
from support.marked_clips import clip, numbers_of

from mmpack.errors import BackendError, VideoError
from mmpack.video import Limits, decode

pytestmark = pytest.mark.decoders

FRAMES = [0, 3, 3, 29, 12, 11]
H264 = {
    "plain": {},
    "one keyframe": {"gop": 100, "options": {"bf": "3"}},
    "Matroska": {"container": "matroska"},
    "with sound": {"sound": True},
    "variable": {"times": [7 * n * n for n in range(30)]},
    "begins late": {"times": [2000 + 40 * n for n in range(30)]},
    "4:2:2": {"pix_fmt": "yuv422p"},
    "bt709": {"colours": (1, 1)},
    "bt709, full range": {"colours": (1, 2)},
    "bt601, full range": {"colours": (5, 2)},
    **{f"turned {degrees}": {"rotation": degrees} for degrees in (90, 180, 270)},
    **{f"width {width}": {"size": (width, 98)} for width in (130, 132, 134, 142)},
}  # fmt: skip
CLOSED = "log-level=none:open-gop=0"  # of x265, whose own default is open
OTHERS = {
    **{codec: {"codec": codec} for codec in ("vp9", "av1")},
    "vp9, bt709": {"codec": "vp9", "colours": (1, 1)},
    "hevc": {"codec": "hevc", "options": {"x265-params": CLOSED}},
    "hevc, turned": {"codec": "hevc", "options": {"x265-params": CLOSED}, "rotation": 270},
}


@pytest.mark.parametrize("name", H264)
@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
def test_h264(backend, name):
    data = clip(**H264[name])
    want = decode(data, FRAMES, backend="pyav")
    np.testing.assert_array_equal(decode(data, FRAMES, backend=backend), want)
    assert numbers_of(want) == FRAMES


@pytest.mark.parametrize("name", OTHERS)
def test_other_codecs(name):
    data = clip(**OTHERS[name])
    got = decode(data, FRAMES, backend="torchcodec")
    np.testing.assert_array_equal(got, decode(data, FRAMES, backend="pyav"))
    with pytest.raises(BackendError, match="decord is exact on h264"):
        decode(data, FRAMES, backend="decord")


@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"pix_fmt": "yuv420p10le"}, "makes other RGB"),
        ({"codec": "vp9", "colours": (1, 2)}, "full range|exact on h264"),
        ({"options": {"x264-params": "open-gop=1"}}, "open GOPs"),
        ({"container": "mpegts"}, "does not find every frame of mpegts"),
        ({"container": "avi"}, "Fix: "),
    ],
)
def test_what_they_would_get_wrong_is_refused(backend, made, why):
    with pytest.raises(BackendError, match=why) as caught:
        decode(clip(**made), FRAMES, backend=backend)
    assert "\n" not in str(caught.value)
    assert numbers_of(decode(clip(**made), FRAMES)) == FRAMES


@pytest.mark.parametrize(
    "made", [{"pix_fmt": "yuv420p10le"}, {"options": {"x264-params": "open-gop=1"}}]
)
def test_the_refusals_are_not_for_nothing(made):
    decord = pytest.importorskip("decord")
    want = decode(clip(**made), range(30))
    theirs = [_first(decord.VideoReader(io.BytesIO(clip(**made))), n) for n in range(30)]
    assert any(not np.array_equal(a, b) for a, b in zip(theirs, want, strict=True))


def _first(reader, number):
    return reader.get_batch([number]).asnumpy()[0]


@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
def test_broken_files(backend):
    data = clip()
    at = data.index(b"mdat") + 1200
    for broken in (b"", data[:3000], data[:at] + bytes(1500) + data[at + 1500 :]):
        with pytest.raises(VideoError, match="Fix: ") as caught:
            decode(broken, range(30), backend=backend)
        assert "\n" not in str(caught.value)
    with pytest.raises(VideoError, match="pixels"):
        decode(data, [0], backend=backend, limits=Limits(max_pixels=100))
