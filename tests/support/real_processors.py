"""Real processors: Qwen's tokenizer once a session, Pillow's image processor with small bounds."""

import numpy as np
import pytest
from PIL import Image

import mmpack as mp


@pytest.fixture(scope="session")
def qwen_tok():
    from mmpack.demo.vocabulary import qwen_tokenizer

    return qwen_tokenizer()


@pytest.fixture
def make_hf(qwen_tok):
    from mmpack.demo.qwen_processor import qwen_vl_processor

    def make(family="qwen2_5_vl", max_pixels=64 * 28 * 28):
        return qwen_vl_processor(family, max_pixels=max_pixels, tokenizer=qwen_tok)

    return make


@pytest.fixture
def hf(make_hf):
    return make_hf()


@pytest.fixture
def processor(hf):
    return mp.wrap_processor(hf)


@pytest.fixture
def picture():
    def make(seed, width=120, height=90, mode="RGB"):
        channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
        shape = (height, width) if channels == 1 else (height, width, channels)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        return Image.fromarray(pixels, mode=None if mode != "CMYK" else "CMYK")

    return make
