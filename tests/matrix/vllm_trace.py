"""The matrix's trace of vLLM: a real engine expands the prompts, its model counts positions; the fixture responds."""

from __future__ import annotations

import tempfile

from matrix.fixture import Fixture
from support.tiny_models import tiny_qwen2_5_vl

from mmpack.adapters.vllm import VllmEngine, to_samples
from mmpack.schema.sample import Sample


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.logprobs import Logprob

    with tempfile.TemporaryDirectory() as folder:
        tiny_qwen2_5_vl().save_pretrained(folder)
        fixture.hf_processor.save_pretrained(folder)
        with VllmEngine(folder) as engine:
            handed = [engine.prompt(messages) for messages in fixture.messages]
            inputs = engine.render(handed)
            places = [engine.positions(given) for given in inputs]
            outputs = [
                RequestOutput(
                    request_id=sample_id,
                    prompt=None,
                    prompt_token_ids=inputs[number]["prompt_token_ids"],
                    prompt_logprobs=None,
                    outputs=[
                        CompletionOutput(
                            index=0,
                            text="",
                            token_ids=response,
                            cumulative_logprob=sum(logprobs),
                            logprobs=[
                                {i: Logprob(lp)} for i, lp in zip(response, logprobs, strict=True)
                            ],
                            finish_reason="stop",
                        )
                    ],
                    finished=True,
                    num_cached_tokens=0,
                )
                for (number, response, logprobs), (sample_id, _) in zip(
                    fixture.rows, fixture.ids, strict=True
                )
            ]
            order = [number for number, _, _ in fixture.rows]
            return to_samples(
                outputs,
                [inputs[p] for p in order],
                [handed[p] for p in order],
                SamplingParams(temperature=1.0, top_p=1.0),
                engine.processor,
                positions=[places[p] for p in order],
                engine=engine.about,
            )
