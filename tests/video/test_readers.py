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

from mmpack.errors import ArgumentError  # noqa: E402
from mmpack.video import FramePlan, Limits, decode, probe, sample  # noqa: E402
from mmpack.video.files.container import Opened, opened  # noqa: E402
from mmpack.video.files.packets import Packets, read_packets  # noqa: E402
from mmpack.video.files.readers import read_as  # noqa: E402

TABLE = {
    (row["kind"], row["number"]): row
    for row in json.loads((FIXTURES / "readings.json").read_text())
}
FEW = range(0, 28, 5)  # in the default suite; all of them beside the libraries


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
    from libraries import READERS

    for number in range(len(RATES)):
        data = clip(kind, number)
        readings = probe(data).readings
        for name, call in READERS.items():
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


def test_an_mp4_in_matroska_is_another_video():
    """20 seconds at 24 frames per second, two per second wanted."""
    video = clip("mkv", 0)
    frames = {
        reader: sample(video, policy="qwen_vl_utils", reader=reader).num_frames
        for reader in ("torchcodec", "opencv", "container")
    }
    assert frames == {"torchcodec": 38, "opencv": 40, "container": 40}
    assert sample(clip("mp4", 0), policy="qwen_vl_utils").num_frames == 40


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


def test_plans_that_name_no_reader_were_made_by_the_container():
    video = clip("mkv", 0)
    plan = sample(video, policy="transformers_qwen3_vl", reader="container")
    values = plan.to_dict()
    del values["settings"]["reader"]
    assert FramePlan.from_dict(values) == plan
