"""The vLLM adapter without an engine: what is missing or rejected is one line, and what batches give it."""

import importlib.util
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
from support.models import with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl

import mmpack.adapters.vllm.engine_inputs as inputs
from mmpack.adapters.vllm import engine, samples, versions
from mmpack.errors import ArgumentError, BackendError, MissingExtraError
from mmpack.families import get_family


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_without_the_package_names_the_extra(monkeypatch):
    for name, value in engine._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingExtraError, match=r"mmpack\[vllm\]"):  # the adapter is imported
        engine.VllmEngine("x")


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
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(BackendError, match="the engine is not in this process"):
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
    # an EngineArgs of before 0.28
    names = ("block_size", "enforce_eager", "max_logprobs", "mm_processor_cache_gb")
    older = SimpleNamespace(
        LLM=reject, EngineArgs=make_dataclass("EngineArgs", names), __version__="0.24.0"
    )
    monkeypatch.setattr(engine, "load_vllm", lambda: older)
    return str(tmp_path), asked


def test_an_older_version_gets_what_it_takes_and_names_the_newer_one(llm, monkeypatch):
    folder, asked = llm
    for triton, error in (
        (False, "Rejected"),
        (True, r"since 0\.28; this is 0\.24\.0\. Fix: install"),
    ):
        found = SimpleNamespace(HAS_TRITON=triton)
        monkeypatch.setattr(engine, "require", lambda name, *_, found=found: found)
        with pytest.raises(BackendError, match=error):
            engine.VllmEngine(folder, kept_ids=True)
    assert asked["max_logprobs"] == -1 and "mm_device_do_normalize" not in asked
    with pytest.raises(BackendError):
        engine.VllmEngine(folder, mm_device_do_normalize=True)  # the caller's own goes to vLLM
    assert asked["mm_device_do_normalize"] is True


def test_outputs_of_an_older_version_are_of_the_weights_that_were_loaded_last():
    output = SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[5, 6]), SimpleNamespace(token_ids=[])]
    )
    versions.label_outputs([output], None)
    assert not hasattr(output.outputs[0], "weight_versions")
    output.outputs[1].weight_versions = told = []
    versions.label_outputs([output], "3")
    [span] = output.outputs[0].weight_versions
    assert (span.start, span.end, span.version) == (0, 2, "3")
    assert output.outputs[1].weight_versions is told  # vLLM's own


def test_one_video_s_metadata_goes_by_keyword_where_vllm_drops_it():
    def renderer(kept):
        parser = SimpleNamespace(video_needs_metadata=kept)
        return SimpleNamespace(get_mm_processor=lambda: SimpleNamespace(data_parser=parser))

    assert versions.metadata_keyword(renderer(True), [{"fps": 2.0}] * 2) == {}
    assert versions.metadata_keyword(renderer(False), [{"fps": 2.0}]) == {
        "video_metadata": [{"fps": 2.0}]
    }
    with pytest.raises(ArgumentError, match=r"2 videos.* Fix: pass one video per prompt"):
        versions.metadata_keyword(renderer(False), [{"fps": 2.0}] * 2)


def test_what_vllm_rejects_is_one_line(llm):
    folder, asked = llm
    with pytest.raises(BackendError, match=r"Rejected: 1 validation.*no such arch.*Fix: ") as error:
        engine.VllmEngine(folder)
    assert "\n" not in str(error.value)
    assert asked["max_model_len"] == asked["max_num_batched_tokens"] == 512
    assert asked["mm_processor_cache_gb"] == 4.0
    with pytest.raises(BackendError):
        engine.VllmEngine(folder, max_model_len=256, chunked_prefill=64, media_cache_gb=0)
    assert (asked["max_model_len"], asked["max_num_batched_tokens"]) == (256, 64)
    assert asked["mm_processor_cache_gb"] == 0


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
    known = samples.items_of([first, {"type": "token"}, second])
    assert samples.item_of(first, "image", 0, known, "f") is whole
    assert samples.item_of(second, "image", 0, known, "f") is whole
    alone = samples.items_of([second])
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
def test_runs_of_placeholders(monkeypatch, family, responses):
    """A video in frames has text between them, which no run covers; media of later turns stay out of a prompt."""
    sample = make_sample(FRAMES, family=family, sample_id="a")
    with_pixels([sample])
    made = []
    monkeypatch.setattr(inputs, "_engine_input", lambda ids, runs, *_: made.append((ids, runs)))
    inputs.from_samples([sample], responses)
    [(ids, runs)] = made
    shown = runs if responses else [*runs, None]
    assert len(shown) == {"qwen2_5_vl": 4, "qwen3_vl": 5}[family]
    assert len(ids) == (len(sample) if responses else sample.loss_spans[0].start)
    pads = set(get_family(family).placeholder_ids.values())
    covered = sorted(i for a, z, _ in runs for i in range(a, z))
    assert covered == [i for i, token in enumerate(ids) if token in pads]
