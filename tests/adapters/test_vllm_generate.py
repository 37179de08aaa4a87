"""vLLM's own `/render` and `/inference/v1/generate` over a real engine: what they say, as samples and back."""

import base64
import copy
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines import messages, picture, reset, shared_engine, trainer, video
from support.recorded_trees import npy

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.vllm import (
    MediaStore,
    from_generate,
    from_render,
    to_generate,
)
from mmpack.adapters.vllm.versions import protocol_class, tokens_module
from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, LayoutError, SchemaError

pytestmark = pytest.mark.engine

RECORDED = sorted((Path(__file__).parents[2] / "fixtures" / "vllm").glob("*.json"))
MAX = TOLERANCES["engines_max"].value
SAMPLING = {"temperature": 0.8, "top_k": 20, "max_tokens": 5, "logprobs": True, "top_logprobs": 84}


@pytest.fixture
def engine():
    engine = shared_engine(kept_ids=True)
    reset(engine)
    return engine


@pytest.fixture
def server(engine):
    from support.vllm_server import Server

    return Server(engine)


def shown(*pictures, text="What is the size of the angle x in this figure?"):
    """Messages of OpenAI's form, pictures as data URLs."""
    parts = []
    for p in pictures:
        file = io.BytesIO()
        p.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return messages(*parts, text=text)


def trainer_logprobs(samples, store=None):
    model, _ = trainer()
    batch = mp.pack(samples, share_prefix=True, media=store)
    with attach(model), torch.no_grad():
        logprobs = mp.linear_selected_logprobs(
            model.model(**model_inputs(batch, model))[0][0],
            model.lm_head.weight,
            batch.loss_targets,
            rows=batch.loss_rows,
            temperature=SAMPLING["temperature"],
            support=batch.kept_ids,
        )
    return batch, logprobs.numpy()


def test_a_rendered_prompt_is_the_sample_that_the_trainer_would_make(engine, server):
    pictures = [picture(1), picture(2, width=200), picture(1)]
    request = server.render(shown(*pictures), **SAMPLING)
    [sample] = from_render([request], engine.processor, images=[pictures], group_ids=["g"])
    assert mp.validate(sample) == [] and sample.sample_id == "g/0"
    assert sample.input_ids.tolist() == request["token_ids"] and len(sample.media) == 2
    hf = trainer()[1]
    shows = messages(*({"type": "image", "image": p} for p in pictures))
    alike = mp.wrap_processor(hf, position_rule="max", video_settings={"fps": 2.0})
    own = alike(shows, [], sample_id="g/0", group_id="g")
    report = mp.compare([sample], [own])
    assert not report.findings, report.lines()
    for mine, theirs in zip(sample.media, own.media, strict=True):
        assert mine.cache_key == theirs.cache_key
        assert np.array_equal(np.asarray(mine.pixel_values), theirs.pixel_values)


def test_the_ratio_is_one_from_render_to_loss(engine, server):
    store = MediaStore()
    prompts = [shown(picture(1)), shown(picture(2, width=200), picture(1)), shown(text="Count.")]
    requests = [server.render(p, **SAMPLING, n=2) for p in prompts]
    responses = [server.generate(r) for r in requests]
    samples = from_generate(
        *(requests, responses, engine.processor),
        logprobs_mode="processed_logprobs",
        group_ids=["one", "two", "text"],
        store=store,
    )
    assert mp.validate(samples) == []
    assert [s.sample_id for s in samples] == [
        f"{g}/{k}" for g in ("one", "two", "text") for k in (0, 1)
    ]
    assert all(m.pixel_values is None for s in samples for m in s.media)
    batch, mine = trainer_logprobs(samples, store)
    assert len(store) == len(batch.media) == 2  # picture 1 came three times
    rollout = np.concatenate([s.rollout_logprobs for s in samples])
    assert np.abs(mine - rollout).max() <= MAX
    assert np.exp(mine - rollout).mean() == pytest.approx(1.0, abs=1e-4)
    for s in samples:
        assert s.sampling["top_k"] == 20 and len(s.kept_ids) == s.num_loss_tokens == 5
        assert s.kept_ids.lengths.tolist() == [20] * 5 and s.finish_reason == "length"


def test_a_sample_goes_back_as_the_request_that_it_came_from(engine, server):
    from vllm import SamplingParams

    decode_mm_kwargs_item = tokens_module("mm_serde", "test").decode_mm_kwargs_item
    request = server.render(shown(picture(1), picture(2, width=200)), **SAMPLING)
    store = MediaStore()
    samples = from_render([request], engine.processor, store=store)
    [back] = to_generate(samples, SamplingParams(max_tokens=3), media=store, model="policy")
    assert back["token_ids"] == request["token_ids"] and back["model"] == "policy"
    mine, theirs = back["features"], request["features"]
    assert mine["mm_hashes"] == theirs["mm_hashes"]
    assert mine["mm_placeholders"] == theirs["mm_placeholders"]
    for a, b in zip(mine["kwargs_data"]["image"], theirs["kwargs_data"]["image"], strict=True):
        a, b = decode_mm_kwargs_item(a), decode_mm_kwargs_item(b)
        assert a.keys() == b.keys() and all(torch.equal(a[k].data, b[k].data) for k in a)
    with pytest.raises(SchemaError, match="MM404"):
        to_generate(samples, SamplingParams(max_tokens=3))


def test_the_page_s_example_runs(engine, server, capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
    code = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    split = [block for block in code if "to_generate" in block]
    assert len(split) == 2
    answer = {
        "/v1/chat/completions/render": server.asked,
        "/inference/v1/generate": server.generate,
    }
    names = {
        "mp": mp,
        "post": lambda path, body: answer[path](body),
        "prompts": [shown(picture(1)), shown(picture(1), picture(2, width=200))],
        "group_ids": ["one", "two"],
        "processor": engine.processor,
    }
    for block in split:
        exec(block, names)
    assert capsys.readouterr().out.strip().endswith("2") and len(names["sent"]) == 2
    assert names["body"]["features"]["kwargs_data"]["image"][0] is None  # it was sent before
    assert mp.validate(names["samples"]) == [] and names["batch"].kept_ids is not None


def test_a_video_with_text_between_its_frames_does_not_go_over_the_wire():
    from vllm import SamplingParams

    from mmpack.demo.qwen_processor import qwen_vl_processor

    hf = qwen_vl_processor("qwen3_vl", min_pixels=32 * 32, max_pixels=16 * 32 * 32)
    sample = mp.wrap_processor(hf)(messages(video(3)), [5], sample_id="film")
    with pytest.raises(ArgumentError, match=r"text between its frames.* Fix: use from_samples"):
        to_generate([sample], SamplingParams())


@pytest.fixture(scope="module")
def made():
    """A request and its response, to be broken."""
    from support.vllm_server import Server

    engine = shared_engine(kept_ids=True)
    server = Server(engine)
    request = server.render(shown(picture(1)), **SAMPLING)
    return engine.processor, request, server.generate(request)


def test_routes_of_the_server_are_the_sample_s(made):
    """A row per token that the engine ran; a layer without experts is zeros. No engine of a CPU returns them."""
    processor, request, response = made[0], *copy.deepcopy(made[1:])
    [choice] = response["choices"]
    length = len(request["token_ids"]) + len(choice["token_ids"])
    order = np.random.default_rng(0).random((length - 1, 4, 8)).argsort(-1)
    rows = order[..., :2].astype(np.uint8)
    rows[:, 1] = 0
    choice["routed_experts"] = npy(rows)
    [sample] = from_generate([request], [response], processor, logprobs_mode="processed_logprobs")
    assert mp.validate(sample) == [] and sample.kept_ids is not None
    assert sample.routed_experts.dtype == np.uint8 and not sample.routed_experts[-1].any()
    assert np.array_equal(sample.routed_experts[:-1], rows[:, [0, 2, 3]])
    assert mp.pack([sample]).routed_experts.shape[1:] == (3, 2)
    choice["routed_experts"] = npy(rows[3:])
    with pytest.raises(
        ArgumentError, match=r"^from_generate: \[0\]: routed_experts has .* rows for"
    ):
        from_generate([request], [response], processor, logprobs_mode="processed_logprobs")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_an_answer_of_an_older_version(path, monkeypatch):
    """Recorded JSON, in the class of vLLM 0.24: no usage, ids of logprobs as text, no ranks, no lists of kept ids."""
    from pydantic import BaseModel
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs

    class Choice(BaseModel):
        index: int
        logprobs: ChatCompletionLogProbs | None
        finish_reason: str | None
        token_ids: list[int]
        routed_experts: str | None = None

    class GenerateResponse(BaseModel):
        request_id: str
        choices: list[Choice]

    own = {"GenerateTokensResponse": GenerateResponse}
    known = lambda name, where: own.get(name) or protocol_class(name, where)  # noqa: E731
    monkeypatch.setattr("mmpack.adapters.vllm.generate.protocol_class", known)
    processor = mp.wrap_processor(trainer()[1])
    request, response = json.loads(path.read_text(encoding="utf-8"))[0].values()
    options = {"logprobs_mode": "processed_logprobs"}
    samples = from_generate([request], [response], processor, **options)
    assert mp.validate(samples) == []
    for sample, choice in zip(samples, response["choices"], strict=True):
        steps = choice["logprobs"]["content"]
        said = [[e["logprob"] for e in s["top_logprobs"] if e["logprob"] > -9999] for s in steps]
        assert [len(ids) for ids in sample.kept_ids.lists()] == [len(s) for s in said] == [3] * 4
        assert np.exp(said).sum(1) == pytest.approx(1, abs=1e-5)  # softmax over the kept ids
        assert sample.rollout_logprobs.tolist() == [np.float32(s["logprob"]) for s in steps]
        assert sample.input_ids.tolist() == request["token_ids"] + choice["token_ids"]
        assert sample.policy_versions is None
    # before 0.31 the server answers a request for every id with one
    request["sampling_params"]["logprobs"] = -1
    for step in response["choices"][0]["logprobs"]["content"]:
        del step["top_logprobs"][1:]
    with pytest.raises(ArgumentError, match=r"every id was asked for and one came.*use vLLM 0\.31"):
        from_generate([request], [response], processor, **options)
    step_of(response)[0]["token"] = "the"
    with pytest.raises(ArgumentError, match="a logprob is of 'the', expected token_id:<id>"):
        from_generate([request], [response], processor, **options)


def step_of(response):
    return response["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    "change, error, why",
    [
        (
            lambda q, a: q["features"]["mm_placeholders"]["image"][0].update(offset=3),
            LayoutError,
            "should fill tokens",
        ),
        (lambda q, a: q.update(features=None), LayoutError, "a medium was dropped"),
        (
            lambda q, a: q["features"]["kwargs_data"].update(image=["AAAA"]),
            ArgumentError,
            "is not a medium of vLLM's",
        ),
        (lambda q, a: a.update(choices=7), ArgumentError, "is not a Generate(Tokens)?Response"),
        (
            lambda q, a: step_of(a)[1].update(logprob=-9999.0),
            ArgumentError,
            "sampled token 1 has no logprob",
        ),
        (lambda q, a: step_of(a).pop(), ArgumentError, "4 logprobs for 5 sampled tokens"),
    ],
)
def test_what_does_not_fit_is_refused(made, change, error, why):
    processor, (request, response) = made[0], copy.deepcopy(made[1:])
    change(request, response)
    with pytest.raises(error, match=why):
        from_generate([request], [response], processor, logprobs_mode="processed_logprobs")


def test_other_things_are_refused(made):
    processor, request, response = made
    for given in (None, {}, [7], [{}]):
        with pytest.raises(ArgumentError, match=r"GenerateRequest"):
            from_render(given, processor)
    with pytest.raises(ArgumentError, match="responses has 2 entries for 1 requests"):
        from_generate([request], [response] * 2, processor)
    with pytest.raises(ArgumentError, match="logprobs_mode is 'raw_logits'"):
        from_generate([request], [response], processor, logprobs_mode="raw_logits")
