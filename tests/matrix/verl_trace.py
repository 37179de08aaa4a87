"""The matrix's trace of verl: what its agent loop makes of a response, a DataProto with positions [B, 4, S]."""

from __future__ import annotations

import asyncio
from types import MethodType, SimpleNamespace
from typing import Any

from matrix.fixture import SAMPLING, Fixture, meta_model
from matrix.transformers_trace import processed

from mmpack.adapters.verl.data import to_samples
from mmpack.schema.sample import Sample

RESPONSE_LENGTH = 16


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    data = data_proto(fixture)
    return to_samples(data, fixture.processor, images=fixture.images(), sampling=dict(SAMPLING))


def data_proto(fixture: Fixture) -> Any:
    """The DataProto that verl's AgentLoopWorker makes of the fixture's rows, without its servers."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    prompts = [p["input_ids"][0].tolist() for p in processed(fixture)]
    outputs = [
        AgentLoopOutput(
            prompt_ids=prompts[number],
            response_ids=response,
            response_mask=[1] * len(response),
            response_logprobs=logprobs,
            multi_modal_data={"images": fixture.pictures[number]},
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )
        for number, response, logprobs in fixture.rows
    ]
    texts = [fixture.texts[number] for number, _, _ in fixture.rows]
    return padded_outputs(fixture, outputs, texts, RESPONSE_LENGTH)


def padded_outputs(
    fixture: Fixture, outputs: list[Any], texts: list[str], response_length: int
) -> Any:
    """The DataProto that verl's worker makes of `AgentLoopOutput`s; `texts`: the prompt of each."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker: Any = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.tokenizer = fixture.hf_processor.tokenizer
    worker.processor = _with_rope_index(fixture.hf_processor)
    worker.rollout_config = SimpleNamespace(
        prompt_length=max(len(o.prompt_ids) for o in outputs), response_length=response_length
    )
    worker.reward_loop_worker_handles = None
    worker.distillation_enabled = False
    worker.mm_processor_kwargs = {}

    async def rows() -> list[Any]:
        return [
            await worker._agent_loop_postprocess(output, validate=False, raw_prompt=text)
            for output, text in zip(outputs, texts, strict=True)
        ]

    return worker._postprocess(asyncio.run(rows()))


def _with_rope_index(hf_processor: Any) -> Any:
    """verl gives its processor the model's functions of positions."""
    from transformers import Qwen2_5_VLModel

    hf_processor.config = meta_model().config
    for name in ("get_rope_index", "get_vision_position_ids"):
        if hasattr(Qwen2_5_VLModel, name):
            setattr(hf_processor, name, MethodType(getattr(Qwen2_5_VLModel, name), hf_processor))
    return hf_processor
