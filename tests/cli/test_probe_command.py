"""`mmpack probe`: sides as specifications and files, exit codes, and one line for what is wrong."""

import json

import pytest
from support.kits.samples import draw_pixels, probe_samples
from support.process import call_mmpack, refused

import mmpack as mp

TINY = "tiny:qwen2_5_vl"


def test_a_temperature_parts(tmp_path):
    page, figure = tmp_path / "a.html", tmp_path / "a.png"
    other = f"{TINY}?layout=padded&temperature=0.5"
    result = call_mmpack("probe", TINY, other, "--html", page, "--png", figure)
    assert result.returncode == 1, result.stderr
    assert "first at logprobs" in result.stdout and "again: mmpack probe" in result.stdout
    rows = result.stdout.split("of its bound\n")[1].splitlines()
    assert rows and all(len(row.split()) == 5 for row in rows)
    assert "Parted" in page.read_text() and figure.read_bytes()[:4] == b"\x89PNG"


def test_a_saved_record_is_a_side(tmp_path):
    path = tmp_path / "a.probe"
    assert call_mmpack("probe", TINY, "--save", path, "--tokens", "loss").returncode == 0
    same = call_mmpack("probe", path, f"{TINY}?layout=padded", "--tokens", "loss", "--json")
    document = json.loads(same.stdout)
    assert same.returncode == 0 and document["ok"] and document["first"] is None, same.stderr
    assert document["command"].startswith(f"mmpack probe {path} '{TINY}?layout=padded'")
    assert document["about_b"]["dtype"] == "float32"
    refused("probe", path, f"{TINY}?seed=1", parts=["different tokens"])


def test_a_trace_with_drawn_pixels(tmp_path):
    path = tmp_path / "t.jsonl"
    mp.write_trace(path, probe_samples("qwen2_5_vl"))
    args = ("probe", TINY, f"{TINY}?layout=alone", "--trace", str(path), "--limit", "2")
    result = call_mmpack(*args, "--draw-pixels")
    assert result.returncode == 0, result.stderr
    refused(*args, parts=["Fix: pass --media-root DIR"])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_drawn_samples_keep_the_rules(family):
    samples = probe_samples(family)
    assert mp.validate(samples) == []
    assert draw_pixels(samples) == 0
    assert all(m.pixel_values is not None for s in samples for m in s.media)
    again = probe_samples(family)
    assert [s.input_ids.tolist() for s in samples] == [s.input_ids.tolist() for s in again]


def test_a_saved_model_without_its_processor(tmp_path):
    from support.tiny_models import tiny_model

    folder, path = tmp_path / "model", tmp_path / "t.jsonl"
    tiny_model("qwen2_5_vl").save_pretrained(folder)
    mp.write_trace(path, probe_samples("qwen2_5_vl"))
    args = ("probe", f"hf:{folder}", f"hf:{folder}?temperature=0.5", "--trace", str(path))
    result = call_mmpack(*args, "--draw-pixels", "--limit", "1")
    assert result.returncode == 1 and "first at logprobs" in result.stdout, result.stderr
    assert result.stderr == ""  # no bars where there is no terminal
    result = call_mmpack(*args, "--media-root", str(tmp_path))
    assert result.returncode == 2 and "processor's files" in result.stderr.splitlines()[-1]
