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
ADDED = {  # Qwen2.5-VL's added_tokens_decoder: id, token, special
    151643: ("<|endoftext|>", True),
    151644: ("<|im_start|>", True),
    151645: ("<|im_end|>", True),
    151646: ("<|object_ref_start|>", True),
    151647: ("<|object_ref_end|>", True),
    151648: ("<|box_start|>", True),
    151649: ("<|box_end|>", True),
    151650: ("<|quad_start|>", True),
    151651: ("<|quad_end|>", True),
    151652: ("<|vision_start|>", True),
    151653: ("<|vision_end|>", True),
    151654: ("<|vision_pad|>", True),
    151655: ("<|image_pad|>", True),
    151656: ("<|video_pad|>", True),
    151657: ("<tool_call>", False),
    151658: ("</tool_call>", False),
    151659: ("<|fim_prefix|>", False),
    151660: ("<|fim_middle|>", False),
    151661: ("<|fim_suffix|>", False),
    151662: ("<|fim_pad|>", False),
    151663: ("<|repo_name|>", False),
    151664: ("<|file_sep|>", False),
}


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer()


@pytest.fixture(scope="module")
def oracle():
    package = Path(importlib.util.find_spec("dashscope").origin).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        ranks = tiktoken.load.load_tiktoken_bpe(str(package / "resources" / "qwen.tiktoken"))
    special = {text: i for i, (text, _) in ADDED.items()}
    return tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def by_tiktoken(oracle, text: str) -> list[int]:
    return oracle.encode(unicodedata.normalize("NFC", text), allowed_special="all")


# ---------------------------------------------------------------- the vocabulary


def test_added_tokens(tokenizer):
    found = {i: (str(t), t.special) for i, t in tokenizer.added_tokens_decoder.items()}
    assert found == ADDED
    assert len(tokenizer) == 151665
    for i, (text, _) in ADDED.items():
        assert tokenizer(f"a{text}b")["input_ids"][1] == i
    assert sorted(tokenizer.all_special_ids) == [i for i, (_, special) in ADDED.items() if special]


def test_named_tokens_and_padding(tokenizer):
    assert type(tokenizer) is transformers.Qwen2Tokenizer
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (151645, 151643)
    assert tokenizer.bos_token is None
    assert tokenizer.unk_token is None
    batch = tokenizer(["x", "x = 3"], padding=True)
    assert batch["input_ids"] == [[151643] * 3 + [87], [87, 284, 220, 18]]
    assert batch["attention_mask"] == [[0, 0, 0, 1], [1, 1, 1, 1]]


def test_every_token_is_what_its_merges_make(tokenizer, oracle):
    """All 151,643 of them: without the right merge, a token falls apart."""
    model = tokenizer.backend_tokenizer.model
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}
    for i in range(oracle.n_vocab - len(ADDED)):
        assert [t.id for t in model.tokenize(vocabulary[i])] == [i]


def test_every_token_has_tiktokens_bytes(tokenizer, oracle):
    letters = {chr(b): b for b in range(256)}
    letters |= {letter: byte for byte, letter in map_of_bytes().items()}
    for token, i in tokenizer.get_vocab().items():
        if i < 151643:
            assert bytes(letters[c] for c in token) == oracle.decode_single_token_bytes(i)


def map_of_bytes():
    """Byte to letter, as the library `tokenizers` spells characters that hold all bytes of UTF-8 between them."""
    from tokenizers.pre_tokenizers import ByteLevel

    pre = ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for point in [*range(0x80), *range(0x80, 0x800, 7), *range(0x800, 0x10FFFF, 997)]:
        if 0xD800 <= point < 0xE000:
            continue
        spelled = "".join(part for part, _ in pre.pre_tokenize_str(chr(point)))
        found |= dict(zip(chr(point).encode(), spelled, strict=True))
    return found


# ---------------------------------------------------------------- encoding

TEXTS = [
    "Find x.",
    "In \\odot X, A B = 30, C D = 30, and m \\widehat C Z = 40. Find m \\widehat A B.",
    "$\\angle ABC = 52^\\circ$, so $x = \\frac{180 - 52}{2} = 64$.",
    "\\triangle A B C in Figure 1 is similar to \\triangle D E F in Figure 2.",
    "<think>\n\nFirst, 13² = 5² + 12².\r\n</think>\n\n\\boxed{12}<|im_end|>",
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x.<|im_end|>\n",
    "  leading,   inner \t\t and trailing   ",
    "don't I'LL we've 3.14159 1234567890",
    "求角度 ∠ABC，三角形的内角和为180度。",
    "한국어 العربية हिन्दी ไทย עברית Ελληνικά",
    "👩‍👩‍👧‍👦 é é ﬁ Å ½ ﷺ ǆ",
    "def f(x):\n    return {'a': [x**2 for x in range(10)]}\n",
    '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2, 3, 4]}}\n</tool_call>',
    "\x00\x01\x7f\xa0\xad\u200b\ufeff",
    "a" * 3000,
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_tiktoken(tokenizer, oracle, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == by_tiktoken(oracle, text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


@given(st.data())
def test_encodes_any_text_as_tiktoken(tokenizer, oracle, data):
    # letters that Unicode has had for long: the libraries' tables are of different years
    letters = st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs", "Cn", "Co"))
    maths = st.sampled_from(
        ["\\frac", "^\\circ", " = ", "°", "  ", "\r\n", "'s", "<|im_end|>", "√", "12"]
    )
    text = "".join(data.draw(st.lists(st.text(letters, max_size=6) | maths, max_size=12)))
    ids = tokenizer(text)["input_ids"]
    assert ids == by_tiktoken(oracle, text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_decode_without_special_tokens(tokenizer):
    ids = tokenizer("<|im_start|>x<tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<tool_call>"


def test_a_saved_tokenizer_comes_back(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.added_tokens_decoder == tokenizer.added_tokens_decoder
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


# ---------------------------------------------------------------- what can be missing


def test_without_dashscope(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "dashscope" else find(name, *a),
    )
    with pytest.raises(MissingExtraError, match=r"'dashscope'.*pip install 'mmpack\[smoke\]'"):
        qwen_tokenizer()


def test_another_vocabulary(tmp_path):
    other = tmp_path / "qwen.tiktoken"
    other.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ArgumentError, match=r"qwen\.tiktoken has sha256"):
        qwen_vocab.read_ranks(other)


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
            [
                {"role": "system", "content": " Be brief.\n"},
                {"role": "user", "content": "Hi {{ x }} "},
            ],
            {},
            "<|im_start|>system\n Be brief.\n<|im_end|>\n<|im_start|>user\nHi {{ x }} <|im_end|>\n",
        ),
        (
            [{"role": "system", "content": [text("Be "), text("brief.")]}, user(text("\n  Hi\n"))],
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n\n  Hi\n<|im_end|>\n",
        ),
        (
            [
                user(
                    IMAGE, VIDEO, {"image": "a.png"}, {"image_url": "u"}, {"video": "v"}, text("?")
                ),
                {"role": "assistant", "content": "A"},
                {"role": "tool", "content": '{"a": 1}'},
                user({"type": "image", "image": "b.png"}, text("Now?")),
            ],
            {"add_generation_prompt": True},
            f"{SYSTEM}<|im_start|>user\n{ONE_IMAGE}{ONE_VIDEO}{ONE_IMAGE}{ONE_IMAGE}{ONE_VIDEO}?<|im_end|>\n"
            '<|im_start|>assistant\nA<|im_end|>\n<|im_start|>tool\n{"a": 1}<|im_end|>\n'
            f"<|im_start|>user\n{ONE_IMAGE}Now?<|im_end|>\n<|im_start|>assistant\n",
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


def test_chat_template_renders_the_same_without_trimmed_blocks(processor):
    import jinja2

    template = jinja2.Environment().from_string(processor.chat_template)
    messages = [user(IMAGE, text("Find x."))]
    assert template.render(
        messages=messages, add_generation_prompt=True
    ) == processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_processor_expands_placeholders(processor, tokenizer):
    images = [Image.new("RGB", (120, 90)), Image.new("RGBA", (1200, 700))]
    prompt = processor.apply_chat_template([user(IMAGE, IMAGE, text("Find x."))], tokenize=False)
    batch = processor(text=[prompt], images=images, return_tensors="np")
    # by smart_resize: 120×90 rounds to 112×84, and 1200×700 shrinks to 280×168 under 64·28·28 pixels
    assert batch["image_grid_thw"].tolist() == [[1, 6, 8], [1, 12, 20]]
    assert batch["pixel_values"].shape == (6 * 8 + 12 * 20, 3 * 2 * 14 * 14)
    ids = batch["input_ids"][0]
    assert (ids == 151655).sum() == 12 + 60
    assert tokenizer.decode(ids[ids != 151655]) == prompt.replace("<|image_pad|>", "")


@pytest.mark.parametrize(
    ("family", "base"),
    [("qwen2_vl", transformers.Qwen2VLProcessor), ("qwen2_5_vl", transformers.Qwen2_5_VLProcessor)],
)
def test_families(tokenizer, family, base):
    processor = qwen_vl_processor(family, tokenizer=tokenizer)
    assert isinstance(processor, base)
    assert type(processor).__name__ == base.__name__
    size = processor.image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (3136, 12845056)
    assert {"input_ids", "pixel_values", "image_grid_thw"} <= set(processor.model_input_names)


def test_bounds_reach_the_image_processor(tokenizer):
    bounds = {"min_pixels": 30 * 28 * 28, "max_pixels": 40 * 28 * 28}
    image_processor = qwen_vl_processor(tokenizer=tokenizer, **bounds).image_processor
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


def test_a_checkpoint_without_settings_of_videos_has_those_of_pictures(tokenizer, tmp_path):
    from mmpack.adapters.transformers.without_torchvision import WITHOUT_TORCHVISION

    processor = WITHOUT_TORCHVISION["Qwen2_5_VLProcessor"](
        transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 78400}),
        tokenizer,
    )
    processor.video_processor.settings["size"] = {"shortest_edge": 3136, "longest_edge": 31360}
    processor.save_pretrained(tmp_path)
    kind = type(processor)
    assert kind.from_pretrained(tmp_path).video_processor.size["longest_edge"] == 31360
    (tmp_path / "video_preprocessor_config.json").unlink()
    assert kind.from_pretrained(tmp_path).video_processor.size["longest_edge"] == 78400


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


def test_bounds_of_one_processor_are_not_those_of_the_next():
    kind = type(qwen_vl_processor(max_pixels=56 * 56 * 4).image_processor)
    assert kind.size == {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
