"""vLLM's media cache on and off: the same samples bit for bit, the same logprobs; its hits and its misses."""

import numpy as np
import pytest
from support.engines import image, messages, reset, shared_engine, video
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.adapters.vllm import MediaStore, to_samples
from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, BackendError

pytestmark = pytest.mark.engine

MAX = TOLERANCES["engines_max"].value
PROMPTS = [
    messages(image(21)),
    messages(image(22, width=200), image(21), text="Which is larger?"),
    messages(video(23)),
    messages(video(23, fps=1.0)),  # the same frames at other times
    messages(image(21), image(21), text="Are these two the same?"),
]
NAMES = ["one", "two", "film", "slow", "twice"]
SHOWINGS = 7  # of media, in all prompts


def rollouts(engine, prompts=PROMPTS, names=NAMES):
    reset(engine)
    return engine.rollout(prompts, names, n=2, max_new_tokens=5)


# -- an engine of one's own, whose inputs lack what is in the cache ----------------------------------------------------


def left_out(inputs):
    return [item is None for g in inputs for items in g["mm_kwargs"].values() for item in items]


@pytest.mark.parametrize("pictures", [True, False])
def test_hits_are_found_in_the_store_and_refused_without(pictures):
    """Inputs as vLLM renders them, twice: the second time all media are hits. Without pictures: by their pixels."""
    from vllm import SamplingParams

    engine = shared_engine()
    reset(engine)
    engine.llm.reset_mm_cache()
    handed = [engine.prompt(p) for p in (*PROMPTS[:3], PROMPTS[4])]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    page, store = "docs/engines.md", MediaStore()
    [code] = [block for block in blocks(page) if "skip_mm_cache=True" in block[1]]
    names = {"llm": engine.llm, "prompts": handed, "sampling": params, "store": store}
    runs = []
    distinct, showings = 3, 6
    for hits in (showings - distinct, showings):
        inputs = engine.llm.renderer.render_cmpl(handed)
        assert sum(left_out(inputs)) == hits
        outputs = engine.generate(inputs, params, True)
        given = (outputs, inputs, handed if pictures else None, params, engine.processor)
        runs.append(to_samples(*given, group_ids=list("abcd"), store=store))
        engine.reset_prefix_cache()
    assert len(store) == len(mp.pack(runs[1], media=store).media) == distinct
    for mine, theirs in zip(*runs, strict=True):
        assert mp.validate(mine) == [] and mine.media_cache_keys == theirs.media_cache_keys
        assert mine.modality_spans == theirs.modality_spans
        np.testing.assert_allclose(mine.rollout_logprobs, theirs.rollout_logprobs, atol=MAX, rtol=0)
    with pytest.raises(
        ArgumentError, match=r"image 0 of an input has no pixels.* Fix: pass store="
    ):
        to_samples(*given)
    with pytest.raises(ArgumentError, match=r"VllmEngine\.positions: image 0"):
        engine.positions(inputs[0])
    ran = run(page, names | {"outputs": outputs, "processor": engine.processor}, [code])
    keys = [[s.media_cache_keys for s in side] for side in (ran["samples"], runs[0])]
    assert keys[0] == keys[1]  # the store knows them


# -- VllmEngine: with the cache from empty, with it full, without it; it is started anew twice -------------------------


@pytest.fixture(scope="module")
def runs():
    """Rollouts with the cache from empty, with it full, without it."""
    engine = shared_engine()
    out = {name: rollouts(engine) for name in ("miss", "hit")}
    engine = shared_engine(media_cache_gb=0)
    assert not engine.about["media_cache"]
    return out | {"off": rollouts(engine)}


def same_bits(left, right):
    """Ids, positions, spans and media of two samples, pixels included."""
    assert np.array_equal(left.input_ids, right.input_ids)
    assert np.array_equal(left.position_ids, right.position_ids)
    assert left.modality_spans == right.modality_spans and left.processor == right.processor
    for a, b in zip(left.media, right.media, strict=True):
        assert a.pixel_values.tobytes() == b.pixel_values.tobytes()
        for name in ("cache_key", "content_hash", "grid_thw", "second_per_grid_ts", "metadata"):
            assert getattr(a, name) == getattr(b, name), name


@pytest.mark.parametrize("name", ["miss", "hit"])
def test_samples_are_those_of_an_engine_without_it(runs, name):
    found, expected = runs[name], runs["off"]
    assert mp.validate(found) == [] and mp.compare(found, expected).ok
    for mine, theirs in zip(found, expected, strict=True):
        same_bits(mine, theirs)
        np.testing.assert_allclose(mine.rollout_logprobs, theirs.rollout_logprobs, atol=MAX, rtol=0)


def test_the_same_frames_at_other_times_are_another_video(runs):
    for found in runs.values():
        [film] = found[NAMES.index("film") * 2].media
        [slow] = found[NAMES.index("slow") * 2].media
        assert (film.second_per_grid_ts, slow.second_per_grid_ts) == (1.0, 2.0)
        assert film.pixel_values.tobytes() == slow.pixel_values.tobytes()


def test_a_small_cache_evicts_and_one_prompt_must_fit(runs):
    engine = shared_engine(media_cache_gb=1.5e-3)  # 1.6 MB: one of the videos and a picture
    for _ in range(2):
        for mine, theirs in zip(rollouts(engine), runs["off"], strict=True):
            same_bits(mine, theirs)
    assert 0 < engine.media_cache_hits() < SHOWINGS
    many = messages(image(25, width=400), image(26, width=400), image(21))  # the last is cached
    with pytest.raises(BackendError, match=r"don't fit into the media cache\. Fix: .*or 0"):
        rollouts(engine, [many], ["p"])
