"""A real vLLM engine on the CPU: its outputs as samples and back, what its model was run with, its weights."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.engines import image, messages, reset, shared_engine, trainer, video
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.vllm import from_samples, to_samples
from mmpack.errors import ArgumentError, ModelError, SchemaError

pytestmark = pytest.mark.engine

PROMPTS = [
    messages(image(1)),
    messages(image(2, width=200), image(1), text="Which is larger?"),
    messages(video(3)),
    messages(text="What is the sum of the angles of a triangle, in degrees?"),
]
NAMES = ["one", "two", "film", "text"]


@pytest.fixture
def engine():
    engine = shared_engine()
    reset(engine)
    return engine


@pytest.fixture
def samples(engine):
    return engine.rollout(PROMPTS, NAMES, n=2, max_new_tokens=6, temperature=0.8, top_p=0.9)


def trainer_logprobs(samples):
    """What transformers computes for the same samples, packed."""
    model, _ = trainer()
    batch = mp.pack(samples, share_prefix=True)
    with attach(model), torch.no_grad():
        return [x.numpy() for x in batch.unpack_loss(packed_logprobs(model, batch))]


def test_samples_of_a_rollout_are_valid_and_complete(samples, tmp_path):
    assert mp.validate(samples) == []
    assert [s.sample_id for s in samples] == [f"{name}/{k}" for name in NAMES for k in range(2)]
    kinds = [[m.modality for m in s.media] for s in samples[::2]]
    assert kinds == [["image"], ["image", "image"], ["video"], []]
    film = samples[4].media[0]
    assert film.grid_thw == (4, 8, 8) and film.second_per_grid_ts == 1.0 and film.fps == 2.0
    for s in samples:
        assert s.sampling["logprobs"] == "raw" and s.sampling["top_p"] == 0.9
        assert s.metadata["engine"]["dtype"] == "float32"
        start, stop = s.loss_spans[0].start, s.loss_spans[0].stop
        [v] = s.policy_versions
        assert (v.start, v.stop, v.version) == (start, stop, "0") and stop == len(s)
    mp.write_trace(tmp_path / "t.jsonl", samples)
    again = mp.read_trace(tmp_path / "t.jsonl")
    assert mp.compare(samples, again).ok
    assert [s.metadata for s in again] == [s.metadata for s in samples]


def test_raw_logprobs_and_scores_are_the_models_whatever_the_sampler_did(engine, samples):
    expected = trainer_logprobs(samples)
    for s, scored, wanted in zip(samples, engine.score(samples), expected, strict=True):
        np.testing.assert_allclose(s.rollout_logprobs, wanted, atol=2e-5, rtol=0)
        np.testing.assert_allclose(scored, wanted, atol=2e-5, rtol=0)


def test_the_model_was_run_with_the_recorded_positions_and_pixels(engine, monkeypatch):
    """A spy on the running model: what it was given, against what the sample says."""
    [model] = engine.llm.apply_model(lambda m: m)
    seen = []
    forward = model.forward

    def spy(input_ids, positions, *args, inputs_embeds=None, **kwargs):
        seen.append((positions.clone(), None if inputs_embeds is None else inputs_embeds.clone()))
        return forward(input_ids, positions, *args, inputs_embeds=inputs_embeds, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    tower, _ = trainer()
    for prompt in PROMPTS[:3]:
        seen.clear()
        [s] = engine.rollout([prompt], ["p"], n=1, max_new_tokens=4)
        given = torch.cat([positions for positions, _ in seen], dim=1).numpy()
        np.testing.assert_array_equal(given, s.position_ids[:, :-1])  # the last is never fed
        embeds = seen[0][1]
        for span in s.modality_spans:
            medium = s.media[span.media_index]
            pixels, grids = torch.from_numpy(medium.pixel_values), torch.tensor([medium.grid_thw])
            encode = getattr(tower.model, f"get_{medium.modality}_features")
            with torch.no_grad():
                [features] = encode(pixels, grids, return_dict=True).pooler_output
            torch.testing.assert_close(embeds[span.start : span.stop], features, atol=1e-5, rtol=0)


def test_samples_go_back_as_the_inputs_that_they_came_from(engine, samples):
    handed = [engine.prompt(p) for p in PROMPTS]
    rendered = engine.render(handed)
    for sample, back in zip(samples[::2], from_samples(samples[::2], responses=False), strict=True):
        given = rendered[NAMES.index(sample.group_id)]
        assert back["prompt_token_ids"] == given["prompt_token_ids"]
        assert back["type"] == given["type"]
        assert back.get("mm_placeholders") == given.get("mm_placeholders")
        for modality, items in given.get("mm_kwargs", {}).items():
            for mine, theirs in zip(back["mm_kwargs"][modality], items, strict=True):
                for name in mine:
                    assert torch.equal(mine[name].data.float(), theirs[name].data.float()), name


def test_pixels_that_are_bytes_go_back_as_floats_and_none_not_at_all():
    hf = trainer()[1]
    floats, held = (
        mp.wrap_processor(hf, pixels=p)(messages(image(0)), [5, 6], sample_id="s")
        for p in ("float32", "uint8")
    )
    assert held.media[0].pixel_values.dtype == np.uint8
    [a], [b] = from_samples([floats]), from_samples([held])
    assert a["mm_kwargs"].keys() == b["mm_kwargs"].keys() == {"image"}
    assert a["mm_kwargs"] == b["mm_kwargs"] and a["mm_hashes"] == b["mm_hashes"]
    held.media[0].pixel_values = None
    with pytest.raises(SchemaError, match="MM404"):
        from_samples([held])


# -- RequestOutputs as the package defines them -----------------------------------------------------------------------


def request_output(**changes):
    from vllm import CompletionOutput, RequestOutput, outputs
    from vllm.logprobs import Logprob

    span = getattr(outputs, "WeightVersionSpan", SimpleNamespace)  # since 0.32
    versions = [span(version=v, start=k, end=k + 1) for k, v in enumerate(("3", "4"))]
    likeliest = {7: Logprob(-0.5, rank=1), 5: Logprob(-1.5, rank=4)}
    completions = [
        CompletionOutput(
            index=k,
            text="",
            token_ids=[5, 151645],
            cumulative_logprob=-1.75,
            logprobs=[likeliest, {151645: Logprob(-0.25, rank=1)}],
            finish_reason=reason,
            stop_reason=None,
        )
        for k, reason in enumerate(("stop", "length", "abort", "error"))
    ]
    for completion in completions:
        completion.weight_versions = versions
    fields = {
        "request_id": "r",
        "prompt": None,
        "prompt_token_ids": [11, 12, 13],
        "prompt_logprobs": None,
        "outputs": completions,
        "finished": True,
        "num_cached_tokens": 2,
    }
    return RequestOutput(**fields | changes)


def converted(engine, output, **options):
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(temperature=0.7, top_k=20, seed=9)
    return to_samples(
        [output], [tokens_input([11, 12, 13])], [{}], params, engine.processor, **options
    )


def test_every_completion_of_a_request_is_a_sample(engine):
    samples = converted(engine, request_output())
    assert [s.sample_id for s in samples] == ["r/0", "r/1", "r/2", "r/3"]
    assert [s.finish_reason for s in samples] == ["stop", "length", "abort", None]
    for s in samples:
        assert s.input_ids.tolist() == [11, 12, 13, 5, 151645]
        assert s.rollout_logprobs.tolist() == [-1.5, -0.25]
        assert s.metadata["argmax_ids"] == [7, 151645]
        versions = [(v.start, v.stop, v.version) for v in s.policy_versions]
        assert versions == [(3, 4, "3"), (4, 5, "4")]
        assert s.prefix_cached_tokens == 2
        assert s.sampling["temperature"] == 0.7 and s.sampling["top_k"] == 20
        assert s.sampling["seed"] == 9
    assert samples[3].metadata["engine"]["finish_reason"] == "error"


def test_the_kind_of_logprobs_is_the_engines_mode_and_lists_are_of_one_length(engine):
    [first, *_] = converted(engine, request_output(), logprobs_mode="processed_logprobs")
    assert first.sampling["logprobs"] == "processed"
    with pytest.raises(ArgumentError, match="logprobs_mode is 'raw_logits'"):
        converted(engine, request_output(), logprobs_mode="raw_logits")
    with pytest.raises(ArgumentError, match="2 groups"):
        converted(engine, request_output(), group_ids=["a", "b"])


def test_bytes_of_an_engine_that_normalises_on_the_device_become_normalised_pixels(engine):
    """Against the processor's own normalisation of the same picture."""
    from vllm import SamplingParams

    picture = image(4)["image"]
    prompt = engine.prompt(messages(image(4)))
    [given] = engine.render([prompt])
    raw = engine.hf_processor.image_processor(
        images=[picture], do_rescale=False, do_normalize=False, return_tensors="pt"
    )["pixel_values"]
    [item] = given["mm_kwargs"]["image"] = copy.deepcopy(given["mm_kwargs"]["image"])  # cached
    wanted = item["pixel_values"].data
    item["pixel_values"].data = raw.round().clamp(0, 255).to(torch.uint8)
    output = request_output(prompt_token_ids=given["prompt_token_ids"])
    [sample, *_] = to_samples([output], [given], [prompt], SamplingParams(), engine.processor)
    torch.testing.assert_close(
        torch.from_numpy(sample.media[0].pixel_values), wanted, atol=1e-5, rtol=0
    )


# -- weights ----------------------------------------------------------------------------------------------------------


def state():
    return {name: t.clone() for name, t in trainer()[0].state_dict().items()}


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.1.self_attn.k_proj.weight",
        "model.language_model.layers.0.self_attn.v_proj.bias",
        "model.visual.blocks.1.mlp.gate_proj.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ],
)
def test_one_value_of_one_tensor_names_that_tensor(engine, name):
    tensors = state()
    assert engine.unlike_weights(tensors) == []
    tensors[name].view(-1)[3] += 1e-3
    assert engine.unlike_weights(tensors) == [name]


def test_a_tensor_that_the_engine_lacks_is_an_error(engine):
    with pytest.raises(ModelError, match="not in the engine"):
        engine.weight_checksums({"model.language_model.layers.9.mlp.up_proj.weight": torch.ones(4)})
    with pytest.raises(ModelError, match="tensor_parallel_size"):
        engine.weight_checksums({"model.language_model.norm.weight": torch.ones(64)})


def test_the_page_s_loop(engine, monkeypatch):
    """docs/engines.md, with the running engine: no second one is started."""
    started = []

    def start(folder, **settings):
        started.append((folder, settings))
        return engine

    monkeypatch.setattr("mmpack.adapters.vllm.VllmEngine", start)
    page = "docs/engines.md"
    [code] = [block for block in blocks(page) if "stale = " in block[1]]
    names = {"prompts": PROMPTS[:2], "group_ids": NAMES[:2], "model": trainer()[0]}
    ran = run(page, names, [code])
    assert started == [("checkpoint", {"dtype": "float32"})]
    assert len(ran["samples"]) == 8 and mp.validate(ran["samples"]) == []
    assert not ran["stale"]
    [after] = engine.rollout(PROMPTS[3:], NAMES[3:], n=1, max_new_tokens=1)
    assert [version.version for version in after.policy_versions] == ["1"]
