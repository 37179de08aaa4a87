"""The vLLM adapter without an engine: what is missing or rejected is one line, and what batches give it."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from support.models import with_pixels
from support.process import run_python
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
import mmpack.adapters.vllm.engine_inputs as inputs
from mmpack.adapters.vllm import engine, samples
from mmpack.errors import ArgumentError, BackendError


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_without_the_package_names_the_extra():
    code = (
        "from mmpack.adapters.vllm import VllmEngine\n"
        "try: VllmEngine('x')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = run_python(code).stdout
    assert said.startswith("MissingExtraError") and "mmpack[vllm]" in said


def test_a_cpu_build_without_libnuma_names_the_package(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    cpu = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", cpu)
    for name in engine._ENVIRONMENT:
        monkeypatch.setenv(name, engine._ENVIRONMENT[name])
    monkeypatch.setattr(engine.sys, "platform", "linux")
    monkeypatch.setattr(engine.ctypes, "CDLL", lambda name: None)
    assert engine.load_vllm() is sys.modules["vllm"]
    monkeypatch.setattr(engine.ctypes, "CDLL", missing)
    with pytest.raises(BackendError, match="apt-get install libnuma1"):
        engine.load_vllm()


class Rejected(ValueError):
    """Its text has as many lines as pydantic's."""


@pytest.fixture
def llm(monkeypatch, tmp_path):
    """A checkpoint's folder, and what is asked of `vllm.LLM`, which rejects it."""
    asked = {}

    def reject(**settings):
        asked.update(settings)
        raise Rejected("1 validation error\n  Value error,\n  no such architecture")

    config = tiny_qwen2_5_vl().config
    config.get_text_config().max_position_embeddings = 512
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(engine, "load_vllm", lambda: SimpleNamespace(LLM=reject))
    return str(tmp_path), asked


def test_what_vllm_rejects_is_one_line(llm):
    folder, asked = llm
    with pytest.raises(BackendError, match=r"Rejected: 1 validation.*no such arch.*Fix: ") as error:
        engine.VllmEngine(folder)
    assert "\n" not in str(error.value)
    assert asked["max_model_len"] == asked["max_num_batched_tokens"] == 512
    with pytest.raises(BackendError):
        engine.VllmEngine(folder, max_model_len=256, chunked_prefill=64)
    assert (asked["max_model_len"], asked["max_num_batched_tokens"]) == (256, 64)


def test_the_media_cache_is_on_unless_it_is_switched_off(llm):
    folder, asked = llm
    for settings, size in (
        ({}, 4.0),
        ({"media_cache_gb": 0}, 0),
        ({"mm_processor_cache_gb": 2}, 2),
    ):
        with pytest.raises(BackendError):
            engine.VllmEngine(folder, **settings)
        assert asked["mm_processor_cache_gb"] == size


def test_an_engine_closes_once():
    calls = []
    core = SimpleNamespace(shutdown=lambda: calls.append("shutdown"))
    running = object.__new__(engine.VllmEngine)
    running.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    running.close()
    running.close()
    assert calls == ["shutdown"]


def given(*items):
    """An engine input of pictures: (hash, item), where an item is None, its fields, or a place in shared memory."""
    return {
        "type": "multimodal",
        "mm_hashes": {"image": [digest for digest, _ in items]},
        "mm_kwargs": {"image": [item for _, item in items]},
    }


def test_a_medium_that_came_before_is_found_by_its_hash():
    whole = {"image_grid_thw": 1}
    first, second = given(("a", whole), ("b", None)), given(("a", None), ("c", {"address": 7}))
    kept = {"b": {"image_grid_thw": 2}, "c": {"image_grid_thw": 3}}
    known = samples.items_of([first, {"type": "token"}, second], kept)
    assert samples.item_of(first, "image", 0, known, "f") is whole
    assert samples.item_of(first, "image", 1, known, "f") is kept["b"]
    assert samples.item_of(second, "image", 0, known, "f") is whole
    assert samples.item_of(second, "image", 1, known, "f") is kept["c"]
    alone = samples.items_of([second], {})
    assert alone == {}
    for k in (0, 1):
        with pytest.raises(
            ArgumentError, match=rf"^f: image {k} of an input has no pixels.* Fix: "
        ):
            samples.item_of(second, "image", k, alone, "f")


FRAMES = [
    ("text", [1, 2]),
    ("image", (1, 4, 4), "a"),
    ("image", (1, 4, 4), "a"),
    ("video", (2, 4, 4), "v"),
    ("text", [3]),
    ("response", [4, 5], 0),
    ("observation", [9], 0),
    ("image", (1, 4, 6), "b"),
    ("response", [7], 1),
]


@pytest.mark.parametrize("responses", [True, False])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_batch_gives_the_runs_that_its_samples_give(monkeypatch, family, responses):
    """A video in frames has text between them, which no run covers."""
    one = make_sample(FRAMES, family=family, sample_id="a")
    two = make_sample([*FRAMES[:-1], ("response", [8, 6], 1)], family=family, sample_id="b")
    with_pixels([one, two])
    monkeypatch.setattr(
        inputs,
        "_engine_input",
        lambda ids, runs, *hashes: [(a, z, m.media_id) for a, z, m in runs],
    )
    expected = inputs.from_samples([one, two], responses)
    assert len(expected[0]) == {"qwen2_5_vl": 3, "qwen3_vl": 4}[family] + responses
    for share_prefix in (False, True):
        batch = mp.pack([one, two], share_prefix=share_prefix)
        assert inputs.from_batch(batch, responses) == expected
