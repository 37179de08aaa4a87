"""The first differing frames in the page: the right ones, decoded from the file or from memory; what can't be shown."""

import base64
import copy
import io

import numpy as np
import pytest
from PIL import Image
from support.html_page import Page
from support.planting.clip import number_of, watched, write_clip
from test_html import PNG

import mmpack as mp
from mmpack.view.parity import frame_viewer as viewer


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("video") / "video.mp4")


@pytest.fixture(scope="module")
def sides(clip):
    return [watched(clip, policy) for policy in ("qwen_vl_utils", "transformers_qwen2_vl")]


def shown(html):
    """The pictures of a page's frames, in order, and its text."""
    page = Page(html)
    drawn = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(a["href"].removeprefix(PNG)))))
        for a in page.all("image")
    ]
    return drawn, "".join(page.text)


def compared(sides, **changes):
    samples = [copy.deepcopy(sample) for sample, _, _ in sides]
    for sample in samples:
        for name, value in changes.items():
            setattr(sample.media[0], name, value)
    return mp.compare([samples[0]], [samples[1]])


def test_both_frames_from_the_file(clip, sides):
    report = compared(sides)
    pictures, text = shown(report.to_html(media_root=clip.parent))
    first = report.first.frames
    assert [number_of(p) for p in pictures] == [first.rollout.index, first.train.index]
    for side in (first.rollout, first.train):
        assert f"frame {side.index} at {side.time}" in text
        assert f"{side.timestamp:g} s" in text and side.policy in text


def test_both_frames_from_memory(sides):
    report = compared(sides, source=None)
    known = {s.media[0].content_hash: frames for s, _, frames in sides}
    pictures, _ = shown(report.to_html(pictures=known))
    first = report.first.frames
    wanted = [first.rollout.index, first.train.index]
    # beside the frames, each medium is drawn by the frame in its middle
    middle = [plan.indices[plan.num_frames // 2] for _, plan, _ in sides]
    assert [number_of(p) for p in pictures] == [*middle, *wanted]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no source recorded"),
        ("gone.mp4", "is not a file below media_root"),
        ("../video.mp4", "is not below media_root"),
        ("short.mp4", "Fix: "),
        ("text.mp4", "Fix: "),
        ("empty.mp4", "is empty"),
        ("one.mp4", "1 frames, so there is no frame"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path, clip, sides, source, message):
    root = tmp_path / "root"
    root.mkdir()
    (root / "short.mp4").write_bytes(clip.read_bytes()[:1500])
    (root / "text.mp4").write_text("no video")
    (root / "empty.mp4").touch()
    write_clip(root / "one.mp4", frames=1)
    (tmp_path / "video.mp4").write_bytes(clip.read_bytes())
    pictures, text = shown(compared(sides, source=source).to_html(media_root=root))
    assert pictures == [] and message in text
    assert "frame 0 at" not in text and "is the first that differs" in text


def test_another_file_of_the_name_is_said(tmp_path, sides):
    write_clip(tmp_path / "video.mp4", brightness=20)
    pictures, text = shown(compared(sides).to_html(media_root=tmp_path))
    assert len(pictures) == 2 and text.count("the file is not the one recorded") == 2


# ---- the same frames, other pixels ---------------------------------------------------------------


def test_the_largest_difference_of_two_files(tmp_path):
    from mmpack.video import decode

    names = ("video.mp4", "brighter.mp4")
    for name, brightness in zip(names, (0, 20), strict=True):
        write_clip(tmp_path / name, brightness=brightness)
    made = [watched(tmp_path / name) for name in names]
    samples = [sample for sample, _, _ in made]
    for sample in samples:  # one video, of whose file neither side recorded the hash
        sample.media[0].media_id, sample.media[0].file_hash = "video", None
    report = mp.compare(samples[:1], samples[1:])
    assert report.first.cause == "frame_pixels"
    pictures, text = shown(report.to_html(media_root=tmp_path))
    one, two = (decode(tmp_path / name, made[0][1].indices).astype(int) for name in names)
    largest = np.abs(one - two).reshape(len(one), -1).max(axis=1)
    place = int(np.argmax(largest > 0))
    assert f"largest difference of a pixel: {largest[place]} of 255" in text
    assert f"frames[{place}]" in text and len(pictures) == 2


def test_frames_of_other_pixels_in_memory(clip, sides):
    sample, plan, frames = sides[0]
    samples = [copy.deepcopy(sample) for _ in range(2)]
    samples[1].media[0].content_hash = samples[1].media[0].cache_key = "e" * 64
    report = mp.compare(samples[:1], samples[1:])
    own = sample.media[0].content_hash
    other = frames.copy()
    other[6:, 3, 5, 1] ^= 64
    pictures, text = shown(report.to_html(pictures={own: frames, "e" * 64: other}))
    assert "frames[6]" in text and "largest difference of a pixel: 64 of 255" in text
    assert f"frame {plan.indices[6]} at" in text
    assert [number_of(p) for p in pictures[2:]] == [plan.indices[6]] * 2
    _, text = shown(report.to_html(pictures={own: frames, "e" * 64: frames[:, ::2, ::2]}))
    h, w = frames.shape[1:3]
    assert f"frames of {w} × {h} px against {w // 2} × {h // 2} px" in text
    pictures, text = shown(report.to_html(media_root=clip.parent))
    assert pictures == [] and "decode to equal pixels here" in text
    _, text = shown(report.to_html())
    assert "can't be compared: no folder of media was given" in text


def test_equal_videos_open_no_file(clip, sides):
    class Asked(dict):
        def get(self, *key):
            pytest.fail(f"looked for {key}")

    report = mp.compare([sides[0][0]], [copy.deepcopy(sides[0][0])])
    assert "data:image/png" not in report.to_html(media_root=clip.parent, pictures=Asked())


# ---- bounds and looks ----------------------------------------------------------------------------


def many(sides, count):
    left, right = ([copy.deepcopy(side[0]) for _ in range(count)] for side in sides)
    for trace in (left, right):
        for i, sample in enumerate(trace):
            sample.sample_id = f"s{i}"
    return mp.compare(left, right)


def test_a_report_decodes_a_few_frames(clip, sides, monkeypatch):
    calls = []

    def counted(*args, **keywords):
        calls.append(args)
        return decode(*args, **keywords)

    decode = viewer.decode
    monkeypatch.setattr(viewer, "decode", counted)
    pictures, text = shown(many(sides, 12).to_html(media_root=clip.parent))
    assert len(pictures) == len(calls) == viewer.MOST
    assert text.count("only frames of the first videos are drawn") == 12 - viewer.MOST // 2
