"""Checkpoints that can't be loaded: one line each, whatever is wrong with them."""

import json

import pytest
import torch
import transformers
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers.load import load_checkpoint

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


def broken(folder, checkpoint, name):
    """A folder with one thing wrong."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)

    def write(file, text):
        (folder / file).unlink()
        (folder / file).write_text(text)

    if name == "config is no JSON":
        write("config.json", "{")
    elif name == "config is a list":
        write("config.json", "[1]")
    elif name == "weights are no file of theirs":
        write("model.safetensors", "nothing")
    elif name == "weights of other shapes":
        config = json.loads((checkpoint / "config.json").read_text())
        config["text_config"]["intermediate_size"] = 128
        write("config.json", json.dumps(config))
    elif name == "no processor":
        for file in ("processor_config.json", "tokenizer_config.json", "tokenizer.json"):
            (folder / file).unlink(missing_ok=True)
        for file in folder.glob("preprocessor_config.json"):
            file.unlink()
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "config is no JSON",
        "config is a list",
        "weights are no file of theirs",
        "weights of other shapes",
        "no processor",
    ],
)
def test_broken_checkpoints(tmp_path, checkpoint, name):
    with pytest.raises(mp.ArgumentError, match="can't be loaded") as caught:
        load_checkpoint(str(broken(tmp_path, checkpoint, name)))
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "no/such-model", "a b\x00c", "x" * 5000])
def test_wrong_names(name):
    with pytest.raises(mp.ArgumentError, match="can't be loaded") as caught:
        load_checkpoint(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_other_models(tmp_path):
    transformers.Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(mp.LayoutError, match="'qwen2' belongs to no family"):
        load_checkpoint(str(tmp_path))
