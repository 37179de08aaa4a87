"""predict_cached_tokens on samples that are easy to count. Beside a real engine: test_vllm_prefix_cache.py."""

import pytest
from support.samples import make_sample

from mmpack.cache import predict_cached_tokens
from mmpack.errors import ArgumentError


def asked(prompt, response=0, name=None):
    parts = [("text", range(4)), ("image", (1, 4, 4), name)] if name else []
    parts += [("text", range(prompt - (10 if name else 0)))]
    return make_sample([*parts, *([("response", range(900, 900 + response))] if response else [])])


@pytest.mark.parametrize(
    ("prompt", "tokens"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_whole_blocks_and_never_the_last_token(prompt, tokens):
    assert predict_cached_tokens([asked(prompt)] * 2) == [0, tokens]


def test_what_was_generated_is_cached_but_its_last_token():
    for response, tokens in ((15, 16), (16, 16), (17, 32), (32, 32), (33, 48)):
        first = asked(16, response)
        longer = make_sample([("text", first.input_ids.tolist()), ("text", [5] * 40)])
        assert predict_cached_tokens([first, longer]) == [0, tokens], response
        # together: all prompts come before any response
        assert predict_cached_tokens([first, longer], together=True) == [0, 16]


def test_pictures_are_in_the_keys_of_their_blocks():
    a, b = asked(40, name="x"), asked(40, name="y")
    assert predict_cached_tokens([a, b, a, b], block_size=4) == [0, 4, 36, 36]
    assert predict_cached_tokens([a, b], block_size=4, media_key=lambda m: "one") == [0, 36]
    b.media[0].metadata = a.media[0].metadata = {"vllm_hash": "h"}
    assert predict_cached_tokens([a, b], block_size=4) == [0, 36]


def test_adapters_share_nothing():
    samples = [asked(40)] * 4
    assert predict_cached_tokens(samples, adapters=["", "a", "", "a"]) == [0, 0, 32, 32]
    # no adapter is not one of that name
    assert predict_cached_tokens(samples, adapters=[None, "None", "", "None"]) == [0, 0, 32, 32]


def test_off():
    assert predict_cached_tokens([asked(40)] * 2, prefix_caching=False) == [0, 0]
    assert predict_cached_tokens([]) == []


def test_a_full_cache_gives_away_what_was_freed_first():
    a = make_sample([("text", [1] * 33)])
    b = make_sample([("text", [2] * 33)])
    order = [a, b, a, b]
    assert predict_cached_tokens(order, num_blocks=6) == [0, 0, 32, 32]
    # of a's whole blocks the last is given to b, and the first stays
    assert predict_cached_tokens([a, b, a], num_blocks=4) == [0, 0, 16]
    assert predict_cached_tokens(order, num_blocks=3) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"adapters": ["a", "b"]}, "2 adapters, for 1 samples"),
        ({"adapters": 5}, "adapters is of type int"),
        ({"media_key": "sha256"}, "media_key is of type str"),
        ({"num_blocks": 2}, "needs more than the 2 blocks"),
        ({"num_blocks": 9, "together": True}, "one after the other"),
        ({"prefix_caching": "yes"}, "prefix_caching is of type str"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(about, said):
    with pytest.raises(ArgumentError, match=rf"predict_cached_tokens: .*{said}.*Fix: "):
        predict_cached_tokens([asked(33, name="x")], **about)
    recorded = asked(33, name="x")
    recorded.media[0].metadata = {"vllm_hash": 7}
    with pytest.raises(ArgumentError, match=r"'vllm_hash'.*of type int"):
        predict_cached_tokens([recorded])
    with pytest.raises(ArgumentError, match="media_key gives is of type int"):
        predict_cached_tokens([make_sample([("image", (1, 4, 6))])], media_key=lambda medium: 5)
