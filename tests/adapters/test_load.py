"""Checkpoints that can't be loaded: one line each, whatever is wrong with them."""

import json

import pytest
import torch
import transformers
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers.load import load_checkpoint, load_model, load_processor

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from mmpack.demo.qwen_processor import qwen_vl_processor

    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("qwen3_vl").save_pretrained(folder)
    qwen_vl_processor("qwen3_vl", max_pixels=256 * 1024).save_pretrained(folder)
    return folder


def test_a_checkpoint_comes_back(checkpoint):
    model, processor = load_checkpoint(str(checkpoint))
    assert torch.equal(model.lm_head.weight, tiny_model("qwen3_vl").lm_head.weight)
    assert not model.training and model.dtype == torch.float32
    assert mp.wrap_processor(processor).family.name == "qwen3_vl"
    assert processor.image_processor.size["longest_edge"] == 256 * 1024


BROKEN = {
    "config.json": "{",
    "model.safetensors": "nothing",
    "other shapes": None,
    "tokenizer.json": "{",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(tmp_path, checkpoint, name):
    """With one file of other contents."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / ("config.json" if name == "other shapes" else name)
    file.unlink()
    if name == "other shapes":
        config = json.loads((checkpoint / "config.json").read_text())
        config["text_config"]["intermediate_size"] = 128
        file.write_text(json.dumps(config))
    else:
        file.write_text(BROKEN[name])
    with pytest.raises(mp.ArgumentError, match=r"can't be loaded[^\n]*Fix: [^\n]*$"):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["", "/no/such/folder", "a b\x00c", "x" * 5000])
def test_wrong_names(name):
    with pytest.raises(mp.ArgumentError, match="can't be loaded") as caught:
        load_checkpoint(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_other_models(tmp_path):
    transformers.Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(mp.LayoutError, match="'qwen2' belongs to no family"):
        load_checkpoint(str(tmp_path))


def test_a_family_that_transformers_is_too_old_for(tmp_path, monkeypatch):
    """Named before transformers reads a config that it does not know."""
    monkeypatch.setattr("mmpack.versions.installed_version", lambda _: "5.6.2")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25"}')
    for load in (load_model, load_processor):
        with pytest.raises(
            mp.ModelError, match=r"kimi_k25 needs transformers 5\.15 or newer, 5\.6\.2 is"
        ):
            load(str(tmp_path))
