"""Families of one's own: registered ones are read, wrapped and packed; what mmpack could not follow is refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.kits import get_kit, kit_names, register_kit
from support.kits.samples import mixed_samples

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.families import FAMILIES, family_of_model_type, get_family
from mmpack.families.base import Texts, TwoWay
from mmpack.families.register import problems

VIDEO, AUDIO = get_family("qwen3_vl").video, get_family("qwen2_5_omni").audio


@pytest.fixture
def registered(monkeypatch):
    """FAMILIES and kits are put back after the test."""
    from support import kits

    before = dict(FAMILIES)
    monkeypatch.setattr(kits, "_REGISTERED", {})
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def mine(**fields):
    own = {"name": "mine", "model_types": ("mine_vl",), "processors": ("MineProcessor",)}
    return replace(get_family("qwen3_vl"), **(own | fields))


def test_a_registered_family_is_known_everywhere(registered, tmp_path):
    family = mine(image_token_id=151700, video_token_id=151701, vision_start_id=151702)
    kit = replace(get_kit("qwen3_vl"), family="mine")
    sample = mp.Sample("a", "g", "mine", np.array([1, 2, 3]), [], [], [mp.LossSpan(1, 3)])
    assert [p.code for p in mp.validate([sample])] == ["MM006"]
    assert mp.register_family(family) is family
    assert mp.validate([sample]) == [] and get_family("mine") is family
    assert family_of_model_type("mine_vl") is family
    samples = mixed_samples(register_kit(kit))
    assert mp.validate(samples) == [] and "mine" in kit_names()
    assert (samples[0].input_ids == 151700).any()
    mp.write_trace(tmp_path / "t.jsonl", samples)
    read = list(mp.read_trace(tmp_path / "t.jsonl"))
    assert [s.family for s in read] == ["mine"] * 5
    assert mp.compare(tmp_path / "t.jsonl", read).ok
    assert mp.pack(samples, share_prefix=True).family == "mine"
    assert mp.plan(samples, max_tokens=500).dropped == []


def test_the_page_of_families(registered):
    page = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text("utf-8")
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert family_of_model_type("mine_vl") is names["MINE"]
    assert mp.validate(mixed_samples(register_kit(names["KIT"]))) == []


def test_what_is_refused(registered):
    for family, message in [
        ("qwen3_vl", "is of type str is not a Family|str.* is not a Family"),
        (mine(name="qwen3_vl"), "'qwen3_vl' exists"),
        (mine(name="My family"), "is not a name"),
        (mine(model_types=("qwen3_vl",)), "model type 'qwen3_vl', which belongs to qwen3_vl"),
        (mine(processors="MineProcessor"), "processors='MineProcessor'"),
        (mine(image_token_id=152_064), "image_token_id=152064, expected an id below"),
        (mine(pad_token_id=151655), "pad_token_id=151655, which is a placeholder"),
        (mine(patch_size=0), "patch_size=0"),
        (mine(tokens_per_second=-1.0), "tokens_per_second=-1.0"),
        (mine(video_layout="rows"), "video_layout='rows'. Fix: use one of "),
        (mine(video_token_id=None), "video_layout='frames' but no video_token_id"),
        (mine(position_rules=("grid", "count")), "'count' gives one row"),
        (
            mine(texts=Texts(frame_time="last")),
            "frame_time='last'. Fix: use one of 'first', 'middle'",
        ),
        (
            mine(two_way=TwoWay(("audio",))),
            r"two_way with media=\('audio',\). Fix: .* image, video",
        ),
        (
            mine(video=replace(VIDEO, resize="crop")),
            "resize='crop'. Fix: use one of 'area', 'budget'",
        ),
        (mine(audio=replace(AUDIO, halvings=("half",))), r"halvings=\('half',\)"),
    ]:
        with pytest.raises(ArgumentError, match=message) as caught:
            mp.register_family(family)
        assert "\n" not in str(caught.value) and " Fix: " in str(caught.value)
    with pytest.raises(mp.LayoutError, match="is unknown"):
        register_kit(replace(get_kit("qwen3_vl"), family="mine"))
    with pytest.raises(ArgumentError, match="qwen3_vl has a kit"):
        register_kit(replace(get_kit("qwen3_vl"), spread=1.0))


@pytest.mark.parametrize("name", FAMILIES)
def test_built_in_families_obey_what_others_must(name):
    """Beside the others: a word that only one family uses is its own."""
    allowed = ("video_layout", "pixel_layout", "coordinates", "position_rules")
    found = [why for why, _ in problems(FAMILIES[name])]
    assert [why for why in found if not why.startswith(tuple(f"has {a}=" for a in allowed))] == []
