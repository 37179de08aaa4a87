"""sglang's native responses, built from the package's own classes and by its own TokenizerManager: no engine runs."""

import asyncio
import base64
import io
from types import MethodType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from support.sglang_recorder import recorder
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.errors import ArgumentError, LayoutError

pytestmark = pytest.mark.sglang
IMAGE_PAD = 151655


@pytest.fixture(scope="session")
def prompts(fixture):
    """Expanded by sglang's own function."""
    from matrix.sglang_trace import expanded_prompt

    return [expanded_prompt(fixture, n) for n in range(len(fixture.texts))]


@pytest.fixture
def requests(fixture):
    """Pictures as they are, as bytes, base64 and data URIs: all that /generate takes but URLs."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    forms = [
        lambda p: p,
        png,
        lambda p: base64.b64encode(png(p)).decode(),
        lambda p: "data:image/png;base64," + base64.b64encode(png(p)).decode(),
    ]
    return [
        GenerateReqInput(
            text=fixture.texts[n],
            image_data=[forms[i % 4](p) for p in fixture.pictures[n]],
            sampling_params={"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 16},
            return_logprob=True,
            rid=sample_id,
        )
        for i, ((n, _, _), (sample_id, _)) in enumerate(zip(fixture.rows, fixture.ids, strict=True))
    ]


@pytest.fixture
def answer(fixture, prompts, monkeypatch):
    """(request, row) -> the dict of /generate that sglang's TokenizerManager makes of what its scheduler sends."""
    from sglang.srt.managers import tokenizer_manager as module
    from sglang.srt.managers.io_struct import BatchStrOutput

    settings = SimpleNamespace(batch_notify_size=16, speculative_algorithm=None)
    monkeypatch.setattr(module, "get_serving", lambda: settings)
    monkeypatch.setattr(module, "get_spec", lambda: settings)
    manager = MagicMock(enable_metrics=False, skip_tokenizer_init=False, dump_requests_folder="")
    manager.crash_dump_folder = ""
    manager.config_value = lambda name: "7"
    for name in ("convert_logprob_style", "add_logprob_to_meta_info", "detokenize_logprob_tokens"):
        setattr(manager, name, MethodType(getattr(module.TokenizerManager, name), manager))

    def answer(request, row, routes=None):
        number, ids, logprobs = fixture.rows[row]
        prompt = prompts[number]
        sent = BatchStrOutput(
            **dict.fromkeys(BatchStrOutput.__struct_fields__)
            | {
                "rids": [request.rid],
                "finished_reasons": [{"type": "stop", "matched": ids[-1]}],
                "output_strs": [fixture.hf_processor.tokenizer.decode(ids[:-1])],
                "output_ids": [ids],
                "prompt_tokens": [len(prompt)],
                "completion_tokens": [len(ids)],
                "reasoning_tokens": [0],
                "cached_tokens": [3],
                "image_tokens": [prompt.count(IMAGE_PAD)],
                "output_token_logprobs_val": [logprobs],
                "output_token_logprobs_idx": [ids],
                "retraction_counts": [0],
            }
            | ({"routed_experts": [routes]} if routes is not None else {})
            | (
                {
                    "input_token_logprobs_val": [[None] + [-1.0] * (len(prompt) - 1)],
                    "input_token_logprobs_idx": [hashed(prompt)],
                }
                if request.logprob_start_len == 0
                else {}
            )
        )
        request.top_logprobs_num = 0
        times = MagicMock(first_token_time=1.0)
        times.trace_ctx.tracing_enable = False
        times.get_e2e_latency = lambda: 0.5
        state = module.ReqState(
            out_list=[], finished=False, event=asyncio.Event(), obj=request, time_stats=times
        )
        if request.return_prompt_token_ids:
            state.prompt_token_ids = prompt
        manager.rid_to_state = {request.rid: state}
        asyncio.run(module.TokenizerManager._handle_batch_output(manager, sent))
        return state.out_list[-1]

    return answer


def hashed(prompt):
    """A picture's placeholders as sglang's scheduler has them."""
    from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

    return [MM_PAD_SHIFT_VALUE + 12345 if i == IMAGE_PAD else i for i in prompt]


@pytest.fixture
def responses(requests, answer):
    return [answer(request, row) for row, request in enumerate(requests)]


def png(picture):
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


MOE = SimpleNamespace(num_hidden_layers=4, num_experts_per_tok=2)  # layer 0 has no experts


def drawn_routes(tokens, seed):
    """int32 [tokens, layers, k] of 8 experts; zeros in the layer without."""
    order = torch.rand(tokens, 4, 8, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    order[:, 0] = 0
    return order[..., :2].to(torch.int32)


def recorded(record, prompts, rows):
    """Two answers to one prompt: the first runs it in two parts, the second beside it with the prompt cached.

    (their requests of the recorder, the experts put in for all tokens but the last, what SGLang sends.)
    """
    prompt = prompts[rows[0][0]]
    ids = [row[1] for row in rows]
    first, second = (drawn_routes(len(prompt) + len(i), seed) for seed, i in enumerate(ids))
    second[: len(prompt) - 1] = first[: len(prompt) - 1]
    half = len(prompt) // 2
    a = record.request()
    other = record.request()
    record.forward((a, first[:half]))
    # another request's token in the same batch, as decoding mixes with a part of a prompt
    record.forward((other, drawn_routes(3, 7)), (a, first[half : len(prompt)]))
    b = record.request(cached=record.slots(a)[: len(prompt) - 1].clone())
    record.forward((b, second[len(prompt) - 1 : len(prompt)]), (other, drawn_routes(1, 8)))
    running = [(a, first), (b, second)]
    # With overlap the scheduler learns of an end a batch later: the last sampled token has run, too.
    more = 0 if record.overlap else -1
    for step in range(max(map(len, ids)) + more):
        parts = [
            (request, taken[len(prompt) + step :][:1])
            for (request, taken), own in zip(running, ids, strict=True)
            if step < len(own) + more
        ]
        record.forward(*parts[:: (-1) ** step])  # places in a batch change
    record.flush()
    sent = [record.finish(r, prompt, own) for (r, _), own in zip(running, ids, strict=True)]
    return (a, b), (first[:-1], second[:-1]), sent


def wrong(sample, taken):
    """Positions whose route is not the one put in; the last token's must be none."""
    routes = torch.from_numpy(sample.routed_experts.astype(np.int32))
    assert len(routes) == len(sample.input_ids) == len(taken) + 1 and not routes[-1].any()
    return (routes[:-1] != taken[:, 1:]).flatten(1).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize(("overlap", "shared", "decoded"), [(True, 0, False), (False, 1, True)])
def test_routes_that_sglangs_own_capturer_recorded(
    requests, answer, prompts, fixture, overlap, shared, decoded
):
    """Encoded by the detokenizer, or where there is none by the TokenizerManager."""
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    from mmpack.adapters.sglang import responses_of, to_samples

    rows = fixture.rows[:2]
    with recorder(MOE, shared, overlap) as record:
        _, taken, sent = recorded(record, prompts, rows)
    if decoded:
        sent = DetokenizerManager._b64_encode_per_request(sent)
    responses = [answer(requests[i], i, sent[i]) for i in range(2)]
    samples = to_samples(responses, requests[:2], fixture.processor, config=MOE)
    for response, sample in zip(responses, samples, strict=True):
        text = response["meta_info"]["routed_experts"]
        # a layer was left out, so the text is kept; else the sample's own routes make it again
        assert text in str(sample.to_dict()["metadata"])
    assert [wrong(*pair) for pair in zip(samples, taken, strict=True)] == [[], []]
    assert mp.validate(samples) == [] and responses_of(samples) == responses
    whole = drawn_routes(len(samples[0]) - 1, 3)
    whole[:, 0] = whole[:, 1]
    response = answer(requests[0], 0, whole)
    mixed = [response, answer(requests[1], 1)]  # beside a request without them
    samples = to_samples(mixed, requests[:2], fixture.processor, config=MOE)
    assert samples[0].routed_experts[:-1].tolist() == whole.tolist()
    assert samples[1].routed_experts is None and responses_of(samples) == mixed
    text = response["meta_info"]["routed_experts"]
    assert text not in str(samples[0].to_dict()["metadata"])  # four times the bytes
    with pytest.raises(ArgumentError, match=r"config says. Fix: pass config="):
        to_samples(mixed[:1], requests[:1], fixture.processor)


def test_responses_become_samples(requests, responses, prompts, fixture):
    from mmpack.adapters.sglang import to_samples

    samples = to_samples(
        responses, requests, fixture.processor, group_ids=[g for _, g in fixture.ids]
    )
    for (number, ids, logprobs), s, named in zip(fixture.rows, samples, fixture.ids, strict=True):
        assert (s.sample_id, s.group_id) == named
        assert s.input_ids.tolist() == prompts[number] + ids
        assert s.input_ids[s.loss_indices].tolist() == ids
        assert s.rollout_logprobs.tolist() == logprobs
        assert (s.finish_reason, s.prefix_cached_tokens) == ("stop", 3)
        assert s.policy_versions[0].version == "7"
        assert s.sampling == {"temperature": 0.7, "top_p": 0.9, "logprobs": "processed"}
        assert s.position_ids is None
        known = [fixture.processor.medium(p) for p in fixture.pictures[number]]
        assert [m.cache_key for m in s.media] == [m.cache_key for m in known]
    assert mp.validate(samples) == []


@pytest.mark.parametrize("how", ["return_prompt_token_ids", "logprob_start_len", "input_ids"])
def test_each_way_to_hand_over_the_prompt(requests, answer, prompts, fixture, how):
    from mmpack.adapters.sglang import to_samples

    for (number, _, _), request in zip(fixture.rows, requests, strict=True):
        if how == "return_prompt_token_ids":
            request.return_prompt_token_ids = True
        elif how == "logprob_start_len":
            request.logprob_start_len = 0
        else:
            request.input_ids = fixture.hf_processor.tokenizer(fixture.texts[number])["input_ids"]
            request.text = None
    responses = [answer(request, row) for row, request in enumerate(requests)]
    for (number, ids, _), s in zip(
        fixture.rows, to_samples(responses, requests, fixture.processor), strict=True
    ):
        assert s.input_ids.tolist() == prompts[number] + ids


def test_sglang_s_positions(fixture):
    """Its own function against transformers' get_rope_index, over prompt and response."""
    from matrix import sglang_trace, transformers_trace

    for a, b in zip(
        sglang_trace.matrix_trace(fixture), transformers_trace.matrix_trace(fixture), strict=True
    ):
        assert np.array_equal(a.position_ids, b.position_ids)


def test_requests_and_responses_come_back(requests, responses, fixture, tmp_path):
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    from mmpack.adapters.sglang import from_samples, responses_of, to_samples

    samples = to_samples(responses, requests, fixture.processor)
    assert responses_of(samples) == responses
    mp.write_trace(tmp_path / "t.jsonl", samples)
    read = list(mp.read_trace(tmp_path / "t.jsonl"))
    for again, sent in zip(responses_of(read), responses, strict=True):
        assert again["output_ids"] == sent["output_ids"] and again["text"] == sent["text"]
    for made, asked, s in zip(from_samples(samples), requests, samples, strict=True):
        request = GenerateReqInput(**made)
        request.normalize_batch_and_arguments()
        assert request.input_ids == s.input_ids[: s.loss_spans[0].start].tolist()
        assert request.sampling_params == asked.sampling_params and request.rid != asked.rid
        BaseMultimodalProcessor.validate_mm_data(image_data=request.image_data)
        [item] = request.image_data
        assert BaseMultimodalProcessor._is_preprocessed_input(item)
        pixels = torch.cat([torch.as_tensor(m.pixel_values) for m in s.media])
        assert torch.equal(item["pixel_values"], pixels)
        assert item["image_grid_thw"].tolist() == [list(m.grid_thw) for m in s.media]


def test_a_packed_batch_becomes_requests_that_score(requests, responses, fixture):
    from sglang.srt.managers.io_struct import GenerateReqInput

    from mmpack.adapters.sglang import from_batch, to_samples

    samples = to_samples(responses, requests, fixture.processor)
    batch = mp.pack(samples, share_prefix=True)
    for made, s, ids in zip(
        from_batch(batch, samples), samples, batch.unpack_tokens(batch.input_ids), strict=True
    ):
        request = GenerateReqInput(**made)
        assert request.input_ids == ids.tolist()
        assert request.logprob_start_len == s.loss_spans[0].start - 1 and request.return_logprob
    with pytest.raises(ArgumentError, match="not those of the batch"):
        from_batch(batch, samples[::-1])


def test_sampled_anew_only_what_the_prompt_shows(requests, responses, fixture):
    """Once, under another id; pictures of later turns stay out."""
    from mmpack.adapters.sglang import from_samples, to_samples

    requests[0].stream = True
    requests[0].sampling_params = {"temperature": 0.7, "n": 4}
    [sample] = to_samples(responses[:1], requests[:1], fixture.processor)
    [made] = from_samples([sample])
    assert not {"rid", "stream", "text"} & made.keys()
    assert made["sampling_params"] == {"temperature": 0.7}
    last = max(s.stop for s in sample.modality_spans)
    sample.loss_spans[0].start = last - 1  # as if the last picture came with a later turn
    shown = from_samples([sample])[0].get("image_data")
    grids = [] if shown is None else shown[0]["image_grid_thw"].tolist()
    assert grids == [list(m.grid_thw) for m in sample.media[:-1]]
    scored = from_samples([sample], responses=True)[0]["image_data"][0]
    assert len(scored["image_grid_thw"]) == len(sample.media)


def test_pictures_in_base64_of_any_length(requests, responses, fixture):
    from PIL import Image

    from mmpack.adapters.sglang import to_samples

    def media_of(given):
        request = vars(requests[0]) | {"image_data": given}
        return to_samples(responses[:1], [request], fixture.processor)[0].media

    small = base64.b64encode(png(Image.new("RGB", (56, 56)))).decode()
    large = base64.b64encode(png(fixture.pictures[0][0])).decode()
    for start in ("", "data:image/png;base64,"):
        with pytest.raises(LayoutError, match=r"MM10\d"):
            media_of(start + small)
        assert media_of(start + large)[0].file_hash is not None
    for path in ("cat.png", "abcd" * 20):
        with pytest.raises(ArgumentError, match=f"'{path}' is a path, but there is no media_root"):
            media_of(path)
    with pytest.raises(ArgumentError, match="not base64"):
        media_of("data:image/png;base64,abc")


def test_traps_are_named(requests, responses, fixture):
    from mmpack.adapters.sglang import responses_of, to_samples

    response = responses[0]

    def seen(tokens):
        return {"meta_info": response["meta_info"] | {"prompt_tokens": tokens}}

    for change, error, why in (
        ({"meta_info": None}, ArgumentError, "no meta_info"),
        (seen(9999), LayoutError, "double_expansion"),
        (seen(12), LayoutError, "not_expanded"),
        ({"prompt_token_ids": [1, IMAGE_PAD, 2, IMAGE_PAD, 3]}, LayoutError, "dropped_image"),
        ({"output_ids": response["output_ids"][:2]}, ArgumentError, "other ids"),
    ):
        with pytest.raises(error, match=why):
            to_samples([response | change], requests[:1], fixture.processor)
    without = {k: v for k, v in response.items() if k != "output_ids"}
    with pytest.raises(ArgumentError, match=r"responses\[0\].*retokenized_response"):
        to_samples([without], requests[:1], fixture.processor)
    with pytest.raises(ArgumentError, match="images has 0 entries"):
        to_samples(responses, requests, fixture.processor, images=[])
    number, ids, _ = fixture.rows[0]
    other = fixture.processor(fixture.messages[number], ids, sample_id="a", group_id="a")
    with pytest.raises(ArgumentError, match="a was not made of"):
        responses_of([other])
    requests[0].image_data = ["https://example.org/a.png"]
    with pytest.raises(ArgumentError, match="URL"):
        to_samples(responses[:1], requests[:1], fixture.processor)
    named = to_samples(responses[:1], requests[:1], fixture.processor, images=fixture.pictures[:1])
    assert len(named[0].media) == len(fixture.pictures[0])


def test_the_page_s_example(requests, responses, fixture):
    page = "docs/adapters.md"
    [code] = [block for block in blocks(page) if "adapters.sglang import" in block[1]]
    groups = [group for _, group in fixture.ids]
    names = {"responses": responses, "requests": requests, "groups": groups}
    ran = run(page, names | {"processor": fixture.processor}, [code])
    assert mp.validate(ran["samples"]) == []
    for sample, request in zip(ran["samples"], ran["requests"], strict=True):
        assert list(request["input_ids"]) == sample.input_ids.tolist()
