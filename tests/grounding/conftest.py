"""Samples whose response is a text, in Qwen's tokens."""

import pytest
from support.samples import make_sample


@pytest.fixture(scope="session")
def qwen():
    pytest.importorskip("dashscope")
    from mmpack.demo.vocabulary import qwen_tokenizer

    return qwen_tokenizer()


@pytest.fixture
def answered(qwen):
    """A sample with one picture of 644 × 476, or as many pixels of another family, and a response."""

    def make(text, family="qwen2_5_vl", grid=(1, 34, 46), prompt="Where? (1, 2)", **fields):
        parts = [
            ("text", qwen.encode(prompt)),
            ("image", grid, "a"),
            ("response", qwen.encode(text)),
        ]
        return make_sample(parts, family=family, **fields)

    return make
