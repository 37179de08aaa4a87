"""Routes as vLLM and SGLang hand them over: rows of the tokens that the engine ran."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from mmpack.adapters.engine_routes import decoded_rows, encoded_rows, routes_of_rows
from mmpack.errors import ArgumentError

CONFIG = SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=2)


def rows(tokens=5, layers=3, experts=8, dtype=np.uint8, seed=0):
    order = np.random.default_rng(seed).random((tokens, layers, experts)).argsort(-1)
    return order[..., :2].astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "experts", "stored"), [(np.int32, 8, "uint8"), (np.uint16, 300, "uint16")]
)
def test_the_last_token_gets_a_row_and_layers_without_experts_none(dtype, experts, stored):
    given = rows(layers=4, experts=experts, dtype=dtype)
    given[:, 1] = 0
    given[0, 0, 0] = experts - 1
    out = routes_of_rows(given, 6, "x")
    assert out.dtype == stored and out.shape == (6, 3, 2)
    assert out[:5].tolist() == given[:, [0, 2, 3]].tolist() and not out[5].any()
    whole = np.concatenate([given, given[:1]])  # a row for each token: the last one's says nothing
    assert np.array_equal(routes_of_rows(whole, 6, "x"), out)


def test_sglangs_form_and_back():
    given = rows(dtype=np.int32)
    text = base64.b64encode(given.tobytes()).decode()
    read = decoded_rows(text, CONFIG, "x")
    assert np.array_equal(read, given)
    assert encoded_rows(routes_of_rows(read, 6, "x")) == text
    whole = SimpleNamespace(get_text_config=lambda: CONFIG)  # of a VLM
    assert np.array_equal(decoded_rows(text, whole, "x"), given)
    gemma = SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=None, top_k_experts=2)
    assert np.array_equal(decoded_rows(text, gemma, "x"), given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (rows(3), "has 3 rows for 6 tokens, of which the engine ran 5"),
        (rows()[0], r"is uint8 \[3, 2\], expected expert ids \[5, layers, k\]"),
        (rows(dtype=np.int32) - 9, "is int32"),
        (np.zeros((5, 3, 2), np.uint8), "zero everywhere"),
        ([[1], [2, 3]], "is of type list"),
        (np.full((5, 3, 2), 70_000), "there are 65536 experts"),
    ],
)
def test_what_is_no_rows(given, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        routes_of_rows(given, 6, "x")
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "config", "match"),
    [
        ("no base64!", CONFIG, "not base64 of int32"),
        ("AAAA", CONFIG, "not base64 of int32"),  # three bytes
        ("AAAAAA==", CONFIG, "has 1 ids, no rows of 3 layers with 2 each"),
        ("AAAAAA==", None, "only the model's config says"),
    ],
)
def test_what_is_not_sglangs(text, config, match):
    with pytest.raises(ArgumentError, match=match):
        decoded_rows(text, config, "x")
