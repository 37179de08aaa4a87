"""`mmpack frames`: plans side by side, the exit code, JSON, the contact sheet."""

import json

import numpy as np
import pytest
from support.marked_clips import clip
from support.process import call_mmpack

TWO = ("--policy", "qwen_vl_utils:model=qwen3_vl", "--policy", "transformers_qwen3_vl")


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("videos") / "video.mp4"
    path.write_bytes(clip(138))
    return path


def test_plans_that_differ(video):
    result = call_mmpack("frames", video, *TWO)
    assert result.returncode == 1 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert "128 × 96 px, 138 frames, 25 fps" in lines[0]
    (row,) = [line.split() for line in lines if line.startswith("frames ")]
    assert row == ["frames", "10", "11", "≠"]
    assert next(r.split() for r in lines if r.startswith("reader ")) == [
        "reader",
        *["torchcodec"] * 2,
    ]
    (first, second) = [line for line in lines if line.split()[:1] in (["0"], ["1"])]
    assert "0 at 0.000 s" in first and "≠" not in first
    assert "15 at 0.600 s" in second and "14 at 0.560 s" in second and "≠" in second
    assert lines[-1].startswith("the plans differ in indices, timestamps")
    assert lines[-1].endswith("10 of 11 frames")


def test_plans_that_do_not(video, tmp_path):
    both = ("--policy", "transformers_qwen3_vl", "--policy", "vllm")
    more = ("--set", "model=qwen3_vl", "--set", "reader=container")
    result = call_mmpack("frames", video, *both, *more, "--json", "--out", tmp_path / "plans.json")
    assert result.returncode == 0, result
    document = json.loads(result.stdout)
    assert json.loads((tmp_path / "plans.json").read_text()) == document
    assert document["same"] is True and document["differing"] == []
    assert document["video"]["total_frames"] == 138 and document["video"]["codec"] == "h264"
    (a, b) = document["plans"]
    assert a["indices"] == b["indices"] and len(a["indices"]) == 11


def test_one_plan_and_its_settings(video):
    result = call_mmpack("frames", video, "--policy", "vllm:loader=opencv,num_frames=5", "--json")
    assert result.returncode == 0
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["indices"] == [0, 34, 68, 102, 137]
    # what stands beside the name goes before --set
    more = call_mmpack("frames", video, "--policy", "vllm:fps=1", "--set", "fps=4", "--json")
    assert json.loads(more.stdout)["plans"][0]["settings"]["fps"] == 1.0
    # a text that looks like a number
    for text in ("5.8", '"5.8"'):
        policy = f"transformers_qwen3_vl:transformers={text}"
        (plan,) = json.loads(call_mmpack("frames", video, "--policy", policy, "--json").stdout)[
            "plans"
        ]
        assert plan["settings"]["transformers"] == "5.8"


def test_variable_rate(tmp_path):
    path = tmp_path / "video.mkv"
    path.write_bytes(clip(5, times=[0, 40, 60, 900, 1000], container="matroska"))
    lines = call_mmpack("frames", path, "--policy", "transformers_qwen2_vl").stdout.splitlines()
    assert ", variable, " in lines[0]
    assert "(really 0.900 s)" in next(line for line in lines if line.split()[:2] == ["3", "3"])


def test_contact_sheet(video, tmp_path):
    from PIL import Image

    sheet = tmp_path / "sheet.png"
    assert call_mmpack("frames", video, *TWO, "--sheet", sheet).returncode == 1
    picture = Image.open(sheet)
    assert picture.format == "PNG" and picture.mode == "RGB" and picture.width == 2160
    pixels = np.asarray(picture)
    assert (pixels == (0xE0, 0xA0, 0x30)).all(-1).sum() > 1000  # where plans differ: orange
    assert len(np.unique(pixels[::4, ::4].reshape(-1, 3), axis=0)) > 500  # there are pictures on it
