"""predict_cached_tokens against a real vLLM engine's num_cached_tokens, its caches on and off."""

import numpy as np
import pytest
from support.engines import image, messages, reset, shared_engine, video

import mmpack as mp
from mmpack.adapters.vllm import from_samples
from mmpack.cache import predict_cached_tokens

pytestmark = pytest.mark.engine

LONG = (
    "What is the size of the angle x in this figure? Explain each step in a sentence of its own. "
    * 3
)
BIG = {"width": 224, "height": 196}
PROMPTS = [
    messages(image(1, **BIG), text=LONG),
    messages(image(1, **BIG), text=LONG + "Now of y."),
    messages(image(2, **BIG), text=LONG),  # the same ids, another picture
    messages(image(2, **BIG), image(1, **BIG), text=LONG),
    messages(image(1, **BIG), image(2, **BIG), text=LONG),  # the same ids, pictures exchanged
    messages(image(1, **BIG), image(1, **BIG), text=LONG),
    messages(text=LONG * 2),
    messages(text=LONG * 2 + "Why?"),
    messages(video(3), text=LONG),
    messages(video(4), text=LONG),
    messages(image(1, **BIG), text=LONG),
]
NAMES = [str(i) for i in range(len(PROMPTS))]


def found_and_predicted(engine, together, n=2, **more):
    reset(engine)
    samples = engine.rollout(PROMPTS, NAMES, n=n, max_new_tokens=9, together=together)
    size = engine.llm.llm_engine.vllm_config.cache_config.block_size
    caching = engine.about["prefix_caching"]
    predicted = predict_cached_tokens(
        samples, block_size=size, prefix_caching=caching, together=together, **more
    )
    return samples, [s.prefix_cached_tokens for s in samples], predicted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"media_cache_gb": 0, "block_size": 64, "chunked_prefill": 256},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_each_request_hits_what_is_predicted(settings):
    engine = shared_engine(**settings)
    for together in (False, True):
        samples, found, predicted = found_and_predicted(engine, together)
        assert predicted == found, together
        caching = settings.get("prefix_caching", True)
        assert (sum(found) > 0) == caching
        assert len(set(found)) > 2 or not caching
        # the same ids and another picture: only what comes before it
        a, b = samples[0], samples[4]
        assert np.array_equal(
            a.input_ids[: a.loss_spans[0].start], b.input_ids[: b.loss_spans[0].start]
        )
        assert found[4] <= a.modality_spans[0].start < found[1] or not caching


def test_turns_that_go_on_hit_what_was_generated():
    """Each sample's ids, response included, are the next prompt; the engine knows media by our cache key."""
    from vllm import SamplingParams

    engine = shared_engine()
    reset(engine)
    size = engine.llm.llm_engine.vllm_config.cache_config.block_size
    params = SamplingParams(temperature=1.0, max_tokens=37, ignore_eos=True)
    samples = engine.rollout(PROMPTS[:4], NAMES[:4], n=1, max_new_tokens=40)
    engine.reset_prefix_cache()
    asked, found = [], []
    for _ in range(3):
        inputs = from_samples(samples)
        outputs = engine.generate(inputs, params, False)
        found += [o.num_cached_tokens for o in outputs]
        samples = [went_on(s, o) for s, o in zip(samples, outputs, strict=True)]
        asked += samples
    predicted = predict_cached_tokens(asked, block_size=size, media_key=lambda m: m.cache_key)
    assert predicted == found
    assert min(found[4:]) > len(asked[0]) - 37 * 2 - size


def went_on(sample, output):
    ids = np.array([*output.prompt_token_ids, *output.outputs[0].token_ids])
    start = len(output.prompt_token_ids)
    more = {
        "input_ids": ids.tolist(),
        "loss_spans": [{"start": start, "stop": len(ids), "kind": "response"}],
    }
    gone = ("rollout_logprobs", "position_ids", "policy_versions", "attention_mask")
    kept = {k: v for k, v in sample.to_dict().items() if k not in gone}
    out = mp.Sample.from_dict(kept | more)
    out.media = sample.media
    return out


def test_a_full_cache_gives_blocks_away_in_the_order_predicted():
    few = 24
    engine = shared_engine(num_gpu_blocks_override=few, max_model_len=512)
    config = engine.llm.llm_engine.vllm_config.cache_config
    assert config.num_gpu_blocks == few
    _, found, predicted = found_and_predicted(engine, False, num_blocks=few - 1)
    assert predicted == found
    _, endless, _ = found_and_predicted(shared_engine(), False)
    assert sum(found) < sum(endless)
