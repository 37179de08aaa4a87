"""Characters and their tokens, against each tokenizer's own decode and against bytes counted one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpack as mp
from mmpack.layout.token_text import token_text

HARD = [
    "(12,345)",
    "深度学习",
    "🙂️🏽‍🚀",
    "naïve Ünïcode",
    '{"bbox_2d": [1, 2]}',
    "ﷺ\u0301",
    "\x00\t\n",
]


@pytest.fixture(scope="module")
def qwen():
    pytest.importorskip("dashscope")
    from mmpack.demo.vocabulary import qwen_tokenizer

    return qwen_tokenizer()


@pytest.fixture(scope="module")
def tiny():
    """A byte-level BPE of few merges: most characters beyond ASCII are split over tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(HARD * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|box_start|>"), AddedToken("<｜é▁end｜>")])
    return tokenizer


def held_bytes(found, pieces):
    """Of each character, the tokens that hold its bytes: counted byte by byte."""
    owner = [k for k, piece in enumerate(pieces) for _ in piece]
    at, out = 0, []
    for char in found.text:
        width = len(char.encode())
        out.append(owner[at : at + width])
        at += width
    assert at == len(owner)
    return out


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.data())
def test_each_character_is_of_the_tokens_that_hold_its_bytes(text, data):
    raw = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=12).map(sorted))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    found = token_text(np.arange(len(pieces)), pieces.__getitem__)
    assert found.text == text
    held = held_bytes(found, pieces)
    assert found.token_of.tolist() == [h[0] for h in held]
    a = data.draw(st.integers(0, len(text)))
    b = data.draw(st.integers(a, len(text)))
    inside = [k for h in held[a:b] for k in h]
    if inside:
        assert found.span(a, b) == (min(inside), max(inside) + 1)
    for k, piece in enumerate(pieces):
        if piece:
            mine = [c for c, h in enumerate(held) if k in h]
            assert list(range(*found.chars(k, k + 1))) == mine


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60))
def test_wrong_bytes_become_what_python_makes_of_them(raw):
    found = token_text(np.arange(len(raw)), lambda i: raw[i : i + 1])
    assert found.text == raw.decode("utf-8", "replace")
    # every byte is of one character: the spans of characters tile the tokens
    spans = [found.span(i, i + 1) for i in range(len(found.text))]
    assert [a for a, _ in spans] == [0, *[b for _, b in spans]][: len(spans)]
    assert not spans or spans[-1][1] == len(raw)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(HARD) | st.text(max_size=8), max_size=5).map("".join))
def test_the_text_is_the_tokenizers_own(tiny, text):
    ids = tiny.encode(text).ids
    found = token_text(ids, tiny)
    assert found.text == tiny.decode(ids, skip_special_tokens=False) == text
    shift = token_text([5, 5, *ids, 7], tiny, 2, 2 + len(ids))
    assert shift.text == text and np.array_equal(shift.token_of, found.token_of + 2)
    assert (shift.start, shift.stop) == (2, 2 + len(ids))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_ids_decode_as_the_tokenizer_decodes_them(tiny, data):
    ids = data.draw(st.lists(st.integers(0, 299), max_size=30))
    assert token_text(ids, tiny).text == tiny.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", HARD + ["<|box_start|>(123,456),(7,89)<|box_end|> 深🙂️"])
def test_qwens_tokenizer(qwen, text):
    ids = qwen.encode(text)
    found = token_text(ids, qwen)
    assert found.text == qwen.decode(ids, skip_special_tokens=False) == text
    for i, char in enumerate(text):  # the tokens of a character decode to a text that holds it
        a, b = found.span(i, i + 1)
        assert char in qwen.decode(ids[a:b])
        assert b - a == 1 or char not in qwen.decode(ids[a : b - 1])
    assert found.starts[0] == 0 and found.starts[-1] == len(text)


@pytest.mark.parametrize(
    "ids, tokenizer, options",
    [
        ([1.5], bytes, {}),
        ([-1], bytes, {}),
        ("12", bytes, {}),
        ([1], None, {}),
        ([1], "qwen", {}),
        ([1], bytes, {"start": 2}),
        ([1], bytes, {"stop": 0.5}),
    ],
)
def test_wrong_arguments(ids, tokenizer, options):
    with pytest.raises(mp.ArgumentError, match=r"token_text: .* Fix: "):
        token_text(ids, tokenizer, **options)


def test_a_vocabulary_of_words_is_refused():
    from tokenizers import Tokenizer, models

    with pytest.raises(mp.ArgumentError, match="not ByteLevel"):
        token_text([0], Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_ranges_beyond_the_text():
    found = token_text([1, 2], lambda i: b"ab")
    for call in (lambda: found.span(0, 5), lambda: found.span(3, 2), lambda: found.chars(0, 3)):
        with pytest.raises(mp.ArgumentError, match="is not within"):
            call()
