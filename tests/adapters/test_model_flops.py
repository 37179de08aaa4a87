"""FLOPs by a model's config, against the modules that transformers makes of it, and against torch's own count."""

import re

import pytest
import torch
from support.kits import get_kit
from torch.utils.flop_counter import FlopCounterMode

from mmpack.errors import ArgumentError
from mmpack.families import FAMILIES
from mmpack.planning import cost_model
from mmpack.planning.flops import model_flops
from mmpack.planning.memory import memory_model

# what a merged token meets, and of how many patches it is
MERGING = {
    r"visual\.(merger|deepstack|downsample)|multi_modal_projector\.(linear|patch_merger)|mm_projector": 4,
    r"mm_input_projection": 16,
    r"embed_vision": 9,
    r"vit_merger\.linear": 4,
    r"model\.merger|modality_projection": 16,
}  # fmt: skip
NO_PRODUCT = r"embed_tokens|lm_head|pos_emb|position_emb|conv1d|cls_token|audio"


def modules_of(family):
    kit = get_kit(family, "test")
    if not kit.available:
        pytest.skip(f"this transformers has no {family}")
    config = kit.model_config()
    with torch.device("meta"):
        return config, kit.classes()[0](config)


def weights_of(config, model):
    """Of the decoder a row, of the tower a patch: entries of the weights that each meets."""
    text, tower = 0.0, 0.0
    part = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(part, n) for n in names if getattr(part, n, None)), 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or re.search(NO_PRODUCT, name):
            continue
        count = parameter.numel()
        if "experts." in name and "shared" not in name:
            count *= part.num_experts_per_tok / experts
        if "language_model" in name or "text_model" in name:
            text += count
            continue
        shares = [n for pattern, n in MERGING.items() if re.search(pattern, name)]
        if config.model_type == "llava_onevision":  # merges none
            shares = []
        tower += count / (shares[0] if shares else 1)
    return text, tower


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_modules(family):
    config, model = modules_of(family)
    text, tower = weights_of(config, model)
    if (
        family == "minicpmv4_6"
    ):  # blocks after the merger in the middle see a quarter of the patches
        blocks = model.model.vision_tower.encoder.layers
        block = sum(p.numel() for p in blocks[0].parameters() if p.ndim == 2)
        tower -= 0.75 * block * (len(blocks) - config.insert_layer_id - 1)
    for given in (config, config.to_dict()):
        found = model_flops(given)
        assert found.row == 2 * text
        assert found.tower.patch == pytest.approx(2 * tower)
    part = config.get_text_config()
    assert found.loss_token == 2 * part.vocab_size * part.hidden_size
    cost = cost_model(config)
    assert cost.row > 0 and cost.pair > 0 and cost.patch > 0
    assert (cost.wave > 0) == FAMILIES[family].linear_attention
    assert (cost.audio_frame > 0) == (FAMILIES[family].audio is not None)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25"])
def test_attention_is_what_torch_counts(family):
    """Eager attention makes all pairs of n rows, n² of them."""
    kit, n = get_kit(family, "test"), 48
    config = kit.model_config()
    if family == "kimi_k25":  # torch does not count the experts' products
        config.text_config.first_k_dense_replace = config.text_config.num_hidden_layers
    model = kit.classes()[0](config).eval()
    model.set_attn_implementation("eager")
    embeds = torch.zeros(1, n, config.get_text_config().hidden_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.language_model(inputs_embeds=embeds, use_cache=False)
    found = model_flops(config)
    pairs = n * n * (found.pair + found.window_pair)
    assert counter.get_total_flops() == n * found.row + pairs
    assert pairs > 0.02 * n * found.row


def test_windows_and_memory_of_the_same_config():
    found = model_flops(get_kit("gemma3", "test").model_config())
    assert found.spans.window == 8 and found.window_pair == 3 * found.pair
    config = get_kit("qwen2_5_vl", "test").model_config()
    found = model_flops(config)
    assert found.spans.tile == 8 and found.tower.tile_pair == found.tower.frame_pair
    assert memory_model(config) == memory_model(config.to_dict())


TEXT = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}


def test_configs_that_lack_a_size():
    assert cost_model(TEXT | {"vision_config": {}}).patch == 0
    for config, message in (
        (
            {"hidden_size": 8},
            "the config has no num_attention_heads, num_hidden_layers, vocab_size",
        ),
        (17, "config is of type int"),
        (TEXT | {"vision_config": {"depth": 2}}, "vision_config: the config has no hidden_size"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cost_model(config)
