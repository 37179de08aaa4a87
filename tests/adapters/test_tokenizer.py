"""Qwen's tokenizer against tiktoken on the same ranks, and the processor built on it."""

import importlib.util
import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmpack.demo import vocabulary as qwen_vocab
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.demo.vocabulary import qwen_tokenizer
from mmpack.errors import ArgumentError, MissingExtraError
from mmpack.processors.settings import vision_settings

pytestmark = pytest.mark.adapter

# Qwen's own, from the tokenizer that its first release came with
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call>
</tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"""
# Qwen2.5-VL's added_tokens_decoder: id, token; from 151657 on they are not special
ADDED = dict(enumerate(NAMES.split(), 151643))


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer()


@pytest.fixture(scope="module")
def oracle():
    package = Path(importlib.util.find_spec("dashscope").origin).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        ranks = tiktoken.load.load_tiktoken_bpe(str(package / "resources" / "qwen.tiktoken"))
    special = {text: i for i, text in ADDED.items()}
    return tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def by_tiktoken(oracle, text: str) -> list[int]:
    return oracle.encode(unicodedata.normalize("NFC", text), allowed_special="all")


# ---------------------------------------------------------------- the vocabulary


def test_added_tokens_and_padding(tokenizer):
    assert type(tokenizer) is transformers.Qwen2Tokenizer and len(tokenizer) == 151665
    found = {i: (str(t), t.special) for i, t in tokenizer.added_tokens_decoder.items()}
    assert found == {i: (text, i < 151657) for i, text in ADDED.items()}
    assert sorted(tokenizer.all_special_ids) == [i for i in ADDED if i < 151657]
    named = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token, tokenizer.unk_token
    assert named == (151645, 151643, None, None)
    batch = tokenizer(["x", "x = 3"], padding=True)
    assert batch["input_ids"] == [[151643] * 3 + [87], [87, 284, 220, 18]]
    assert batch["attention_mask"] == [[0, 0, 0, 1], [1, 1, 1, 1]]


def test_every_token_is_what_its_merges_make(tokenizer, oracle):
    """Without the right merge or the right letters for its bytes, a token falls apart. One of 31 of them."""
    model, vocabulary = tokenizer.backend_tokenizer.model, tokenizer.get_vocab()
    for token, i in list(vocabulary.items())[::31]:
        if i < 151643:
            assert [t.id for t in model.tokenize(token)] == [i]
            raw = oracle.decode_single_token_bytes(i)
            assert tokenizer.decode([i]) == raw.decode(errors="replace")


# ---------------------------------------------------------------- encoding

TEXTS = [
    "<think>\n\nFirst, 13² = 5² + 12².\r\n</think>\n\n\\boxed{12}<|im_end|>",
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x.<|im_end|>\n",
    "don't I'LL we've 3.14159 1234567890   inner \t\t and trailing   ",
    "求角度 ∠ABC，三角形的内角和为180度。한국어 العربية हिन्दी ไทย עברית Ελληνικά",
    "👩‍👩‍👧‍👦 é é ﬁ Å ½ ﷺ ǆ \x00\x01\x7f\xa0\xad\u200b\ufeff",
    '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2, 3, 4]}}\n</tool_call>',
    "a" * 3000,
    "",
]


@given(st.data())
def test_encodes_any_text_as_tiktoken(tokenizer, oracle, data):
    # letters that Unicode has had for long: the libraries' tables are of different years
    letters = st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs", "Cn", "Co"))
    maths = st.sampled_from(
        ["\\frac", "^\\circ", " = ", "°", "  ", "\r\n", "'s", "<|im_end|>", "√", "12"]
    )
    drawn = st.lists(st.text(letters, max_size=6) | maths, max_size=12).map("".join)
    text = data.draw(st.sampled_from(TEXTS) | drawn)
    ids = tokenizer(text)["input_ids"]
    assert ids == by_tiktoken(oracle, text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


# ---------------------------------------------------------------- what can be missing


def test_without_dashscope_or_with_another_vocabulary(monkeypatch, tmp_path):
    other = tmp_path / "qwen.tiktoken"
    other.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ArgumentError, match=r"qwen\.tiktoken has sha256"):
        qwen_vocab.read_ranks(other)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(MissingExtraError, match=r"'dashscope'.*pip install 'mmpack\[smoke\]'"):
        qwen_tokenizer()


# ---------------------------------------------------------------- the processor


@pytest.fixture(scope="module")
def processor(tokenizer):
    return qwen_vl_processor(tokenizer=tokenizer, max_pixels=64 * 28 * 28)


def user(*parts):
    return {"role": "user", "content": list(parts)}


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
ONE_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ONE_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def text(words):
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("messages", "options", "rendered"),
    [
        (
            [user(IMAGE, text("Find x."))],
            {"add_generation_prompt": True},
            f"{SYSTEM}<|im_start|>user\n{ONE_IMAGE}Find x.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [user(IMAGE, VIDEO, IMAGE, text("a")), user(IMAGE, VIDEO)],
            {"add_vision_id": True},
            f"{SYSTEM}<|im_start|>user\nPicture 1: {ONE_IMAGE}Video 1: {ONE_VIDEO}Picture 2: {ONE_IMAGE}a<|im_end|>\n"
            f"<|im_start|>user\nPicture 3: {ONE_IMAGE}Video 2: {ONE_VIDEO}<|im_end|>\n",
        ),
    ],
)
def test_chat_template(processor, messages, options, rendered):
    """Strings as the template released with Qwen2.5-VL renders them."""
    assert processor.apply_chat_template(messages, tokenize=False, **options) == rendered


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_families_and_bounds(tokenizer, family):
    kind = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}[family]
    processor = qwen_vl_processor(family, tokenizer=tokenizer)
    assert isinstance(processor, getattr(transformers, kind)) and type(processor).__name__ == kind
    size = processor.image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (3136, 12845056)
    bounds = {"min_pixels": 30 * 28 * 28, "max_pixels": 40 * 28 * 28}
    image_processor = qwen_vl_processor(family, tokenizer=tokenizer, **bounds).image_processor
    images = [Image.new("RGB", (56, 56)), Image.new("RGB", (560, 560))]
    out = image_processor(images=images, return_tensors="np")
    # a square of 4 tokens grows to the next one above 30, one of 400 shrinks to the next one below 40
    assert out["image_grid_thw"].tolist() == [[1, 12, 12], [1, 12, 12]]


def test_processor_survives_pickle_and_disk(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    for copy in (pickle.loads(pickle.dumps(processor)), type(processor).from_pretrained(tmp_path)):
        assert type(copy) is type(processor)
        assert copy.chat_template == processor.chat_template
        image = Image.new("RGB", (300, 200), (9, 8, 7))
        call = {"text": [f"{ONE_IMAGE}x"], "images": [image], "return_tensors": "np"}
        one, other = processor(**call), copy(**call)
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        assert np.array_equal(one["pixel_values"], other["pixel_values"])
        assert vision_settings(copy.video_processor) == vision_settings(processor.video_processor)


def test_videos_of_sampled_frames_are_laid_out(processor):
    """By transformers' video processor where torchvision is, else by mmpack's."""
    assert processor.video_processor.merge_size == 2
    call = {"text": [ONE_VIDEO], "videos": [np.zeros((4, 3, 56, 56), np.uint8)]}
    out = processor(**call, do_sample_frames=False, return_tensors="pt")
    assert out["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert (out["input_ids"] == 151656).sum() == 8


@pytest.mark.parametrize(
    "call", [{"family": "qwen3_5"}, {"min_pixels": 0}, {"min_pixels": 900, "max_pixels": 800}]
)
def test_arguments(call):
    with pytest.raises(ArgumentError, match="qwen_vl_processor"):
        qwen_vl_processor(**call)
