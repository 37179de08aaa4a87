"""MmpackGRPO of a model with linear attention (Qwen3.5), on images, against TRL's own: a loss and its gradients."""

import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from support.models import relative_difference, small_model
from support.trl_trainers import Packed, make_trainer, trl

from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.transformers.without_torchvision import WITHOUT_TORCHVISION
from mmpack.families import get_family

FAMILY = get_family("qwen3_5")
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


def processor():
    """Qwen3.5's ids around a vocabulary of eight words."""
    special = {"<|vision_start|>": FAMILY.vision_start_id, "<|vision_end|>": FAMILY.vision_end_id}
    special |= {"<|image_pad|>": FAMILY.image_token_id, "<|endoftext|>": FAMILY.pad_token_id}
    special["<|video_pad|>"] = FAMILY.video_token_id
    words = {word: i for i, word in enumerate("abcdefgh")}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | special, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(special))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    tokenizer.padding_side = "left"
    size = {"shortest_edge": 32 * 32, "longest_edge": 6 * 32 * 32}
    images = transformers.Qwen2VLImageProcessorPil(size=size, patch_size=16)
    return WITHOUT_TORCHVISION["Qwen3VLProcessor"](images, tokenizer, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    small_model("qwen3_5", factor=2).save_pretrained(folder)
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "images": [Image.new("RGB", (64, 64), color)],
        }
        for text, color in (("a b c d", "red"), ("e f g h a b c", "blue"))
    ]
    options = {"gradient_checkpointing": False, "beta": 0.05}
    made = [
        make_trainer(cls, folder, folder / "runs", rows, processor(), **options)
        for cls in (trl.GRPOTrainer, Packed)
    ]
    return made, rows


def test_one_loss_and_its_gradients(trainers):
    both, rows = trainers
    found = []
    for trainer in both:
        trainer.current_gradient_accumulation_steps = 1
        torch.manual_seed(0)
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([r for r in rows for _ in range(4)])
        trainer.model.zero_grad(set_to_none=True)
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        own = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
        found.append((float(loss.detach()), own, inputs["completion_ids"]))
        assert not is_attached(trainer.model)
    (wanted, gradients, ids), (loss, ours, same) = found
    assert torch.equal(ids, same)
    assert abs(loss - wanted) <= 1e-5
    assert any("linear_attn" in name and (g != 0).any() for name, g in ours.items())
    assert relative_difference(ours, gradients) <= 5e-5
    assert both[1].mmpack_stats.tokens < both[1].mmpack_stats.tokens_stock
