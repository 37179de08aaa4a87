"""Each reader's fps, frame count and seconds against the library itself: 28 clips in every kind of file."""

import json
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures" / "readers"
sys.path.insert(0, str(FIXTURES))

from reader_clips import KINDS, RATES, clip  # noqa: E402
from support import marked_clips  # noqa: E402

from mmpack.errors import ArgumentError  # noqa: E402
from mmpack.video import FramePlan, Limits, decode, probe, sample  # noqa: E402
from mmpack.video.files.container import Opened, opened  # noqa: E402
from mmpack.video.files.packets import Packets, read_packets  # noqa: E402
from mmpack.video.files.readers import READERS, read_as  # noqa: E402

TABLE = {
    (row["kind"], row["number"]): row
    for row in json.loads((FIXTURES / "readings.json").read_text())
}
FEW = (3, 16)  # in the default suite; all of them beside the libraries


def figures(readings, name):
    reading = readings["opencv" if name == "vllm" else name]
    return [reading.fps, reading.counted(name == "vllm")[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_what_libraries_say(kind):
    for number in FEW:
        readings = probe(clip(kind, number)).readings
        for name in ("opencv", "vllm", "decord", "pyav"):
            want = TABLE[kind, number][name]
            assert want in (None, figures(readings, name)), (number, name)


@pytest.mark.decoders
@pytest.mark.parametrize("kind", KINDS)
def test_the_libraries_themselves(kind):
    import libraries

    for number in range(len(RATES)):
        data = clip(kind, number)
        readings = probe(data).readings
        for name, call in libraries.READERS.items():
            want = call(data)
            mine = figures(readings, name)
            if name == "torchcodec":
                mine.append(readings[name].duration)
            assert want is None or mine == list(want), (number, name)


@pytest.mark.decoders
@pytest.mark.parametrize("kind", KINDS)
def test_torchcodecs_rule(kind):
    """The rule, beside torchcodec itself: they differ only where its FFmpeg reads variable rates in MP4 differently."""
    from libraries import torchcodec

    different = 0
    for number in range(len(RATES)):
        data = clip(kind, number)
        with opened(data, Limits()) as video:
            mine = read_as("torchcodec", video, read_packets(video, Limits()))
        different += (mine.fps, mine.total_frames, mine.duration) != torchcodec(data)
    assert not different or kind == "mp4, variable"


@pytest.mark.parametrize(
    ("policy", "reader"),
    [
        ("qwen_vl_utils", "torchcodec"),
        ("transformers_qwen2_vl", "torchcodec"),
        ("transformers_qwen3_vl", "torchcodec"),
        ("vllm", "opencv"),
    ],
)
def test_a_policy_reads_as_its_upstream(policy, reader):
    video = clip("mkv, variable", 1)
    plan = sample(video, policy=policy)
    assert plan.processor_settings()["reader"] == reader
    assert plan.fps == probe(video).readings[reader].fps != probe(video).readings["pyav"].fps or (
        reader == "opencv"
    )
    assert FramePlan.from_json(plan.to_json()) == plan
    assert len(decode(video, plan)) == plan.num_frames


def test_a_count_beyond_the_stream():
    """OpenCV multiplies; vLLM looks where the end is, and leaves out what it can't read."""
    video = clip("mkv, late", 1)
    info = probe(video)
    assert info.readings["opencv"].total_frames > info.total_frames == 138
    plan = sample(info, policy="vllm", loader="opencv")
    assert plan.total_frames == 138 and max(plan.indices) == 137
    assert len(decode(video, plan)) == 32
    with pytest.raises(ArgumentError, match=r"reader 'opencv' counts \d+ frames.*Fix: "):
        sample(info, policy="transformers_qwen3_vl", reader="opencv")


def test_what_a_reader_cant_read():
    with pytest.raises(ArgumentError, match="its header has no frame count"):
        sample(clip("mkv", 1), policy="transformers_qwen3_vl", reader="pyav")
    with pytest.raises(ArgumentError, match="reader 'vlc' is unknown"):
        sample(clip("mkv", 1), policy="transformers_qwen3_vl", reader="vlc")


# files, and the readers that are refused because upstream gives other frames than asked for
MARKED = {
        "mp4": (lambda: marked_clips.clip(), set()),
        "mkv": (lambda: marked_clips.clip(container="matroska"), {"pyav"}),
        "flv": (lambda: marked_clips.clip(container="flv", options={"bf": "0"}), {"pyav"}),
        "av1": (lambda: marked_clips.clip(codec="av1"), {"opencv", "decord"}),
        "before time 0": (lambda: marked_clips.earlier(80, "mp4"), {"torchcodec", "decord"}),
        "ts, before time 0": (
        lambda: marked_clips.earlier(80, "mpegts"),
        {"torchcodec", "decord", "pyav", "torchvision"},
    ),
        "edit list": (lambda: marked_clips.with_hidden_frames(14), {"torchcodec", "decord"}),
        "ts": (lambda: marked_clips.clip(container="mpegts"), {"torchcodec", "decord", "pyav"}),
        "ts, in order": (
        lambda: marked_clips.clip(container="mpegts", options={"bf": "0"}),
        {"torchcodec", "decord", "pyav"},
    ),
        "avi, B-frames": (
        lambda: marked_clips.clip(container="avi"),
        {"torchcodec", "decord", "torchvision"},
    ),
        "avi, MPEG-4 with B-frames": (
        lambda: marked_clips.clip(codec="mpeg4", container="avi", options={"bf": "2"}),
        {"torchcodec", "decord", "torchvision"},
    ),
        "wmv": (lambda: marked_clips.clip(codec="wmv2", container="asf"), {"decord", "pyav"}),
        "open groups": (lambda: marked_clips.clip(options={"x264-params": "open-gop=1"}), {"decord"}),
        "interlaced": (lambda: marked_clips.clip(options={"x264-params": "interlaced=1"}), {"opencv"}),
        **{
        f"rotated by {degrees}": (lambda degrees=degrees: marked_clips.clip(rotation=degrees), {"pyav", "torchvision"})
        for degrees in (90, 180, 270)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MARKED)
def test_readers_that_give_other_frames_are_refused(name):
    make, refused = MARKED[name]
    readings = probe(make()).readings
    assert {reader for reader in READERS if readings[reader].refusal} == refused
    for reader in refused:
        with pytest.raises(
            ArgumentError, match=f"reader '{reader}': .*Fix: set reader='container'"
        ):
            sample(make(), policy="transformers_qwen3_vl", reader=reader)


def test_vllm_seeks_the_end():
    with pytest.raises(ArgumentError, match="does not find the first frames of mpegts again"):
        sample(MARKED["ts"][0](), policy="vllm")
    assert sample(MARKED["ts"][0](), policy="transformers_qwen3_vl", reader="opencv")
    assert sample(MARKED["ts, in order"][0](), policy="vllm")


@pytest.mark.decoders
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("reader", ["torchcodec", "opencv", "decord", "pyav", "vllm"])
def test_the_frames_that_upstream_gives(reader, name, tmp_path):
    """Those of the plan, in its size, by transformers' functions and by OpenCV as vLLM calls it; or a refusal."""
    from libraries import frames_by

    path = tmp_path / "clip"
    path.write_bytes(MARKED[name][0]())
    policy = "vllm" if reader == "vllm" else "transformers_qwen3_vl"
    given = {"model": "qwen3_vl", "reader": "opencv" if reader == "vllm" else reader}
    try:
        plans = [sample(path, policy=policy, fps=fps, **given) for fps in (2.0, 7.0, 25.0)]
    except ArgumentError:
        return
    for plan in plans:
        theirs = np.asarray(frames_by(reader, path, plan.indices))
        assert theirs.shape[1:] == (plan.source_size[1], plan.source_size[0], 3)
        assert marked_clips.numbers_of(theirs) == marked_clips.numbers_of(decode(path, plan))


def test_theora_that_repeats_pictures():
    """PyAV has no encoder of it: the header and packets of `ffmpeg -f lavfi -i testsrc2 -t 4 x.ogv`, in short."""

    def refusal(codec, held):
        times = np.arange(100)[:held]
        packets = Packets(
            times, times, np.ones_like(times), times % 9 == 0, times >= 0, Fraction(1, 25), True
        )
        stream = SimpleNamespace(
            average_rate=None,
            base_rate=Fraction(25),
            frames=0,
            start_time=0,
            duration=100,
            codec_context=SimpleNamespace(name=codec),
            index=0,
        )
        container = SimpleNamespace(
            duration=4_000_000,
            format=SimpleNamespace(name="ogg"),
            streams=SimpleNamespace(video=[stream]),
        )
        reading = read_as("opencv", Opened(container, stream, "x"), packets)
        assert reading.total_frames == 100
        return reading.refusal

    assert "Theora repeats" in refusal("theora", 77)
    assert refusal("theora", 100) is refusal("vp8", 77) is None
