"""The matrix's trace of sglang: requests of its class, ids by its own expansion, positions by its own function.

No engine runs: responses are built to the schema of its `/generate`; their token ids and logprobs are the fixture's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matrix.fixture import Fixture, meta_model

from mmpack.adapters.sglang import to_samples
from mmpack.schema.sample import Sample


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    prompts = [expanded_prompt(fixture, number) for number in range(len(fixture.texts))]
    places = [_positions(fixture, number, ids) for number, ids in enumerate(prompts)]
    requests = [
        GenerateReqInput(
            text=fixture.texts[number],
            image_data=list(fixture.pictures[number]),
            sampling_params={"temperature": 1.0, "top_p": 1.0},
            return_logprob=True,
            return_prompt_token_ids=True,
            rid=sample_id,
        )
        for (number, _, _), (sample_id, _) in zip(fixture.rows, fixture.ids, strict=True)
    ]
    responses = [
        _response(sample_id, prompts[number], response, logprobs)
        for (number, response, logprobs), (sample_id, _) in zip(
            fixture.rows, fixture.ids, strict=True
        )
    ]
    return to_samples(
        responses,
        requests,
        fixture.processor,
        positions=[places[number] for number, _, _ in fixture.rows],
        logprobs="raw",
    )


def expanded_prompt(fixture: Fixture, number: int) -> list[int]:
    """The prompt's ids, each picture's placeholder repeated by sglang."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    ids = fixture.hf_processor.tokenizer(fixture.texts[number])["input_ids"]
    counts = [fixture.processor.medium(p).num_tokens for p in fixture.pictures[number]]
    placeholder = fixture.processor.family.image_token_id
    return list(BaseMultimodalProcessor._expand_input_ids(ids, counts, placeholder))


def _positions(fixture: Fixture, number: int, ids: list[int]) -> tuple[np.ndarray, int]:
    """int64 [3, P] and rope delta."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    config: Any = meta_model().config
    grids = [fixture.processor.medium(p).grid_thw for p in fixture.pictures[number]]
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=config.vision_config.spatial_merge_size,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        model_type=config.model_type,
        tokens_per_second=config.vision_config.tokens_per_second,
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor(grids),
    )
    return positions.reshape(3, -1).numpy(), int(delta)


def _response(
    name: str, prompt: list[int], response: list[int], logprobs: list[float]
) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": response,
        "prompt_token_ids": prompt,
        "meta_info": {
            "id": name,
            "finish_reason": {"type": "stop", "matched": response[-1]},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(response),
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [
                (lp, i, None) for lp, i in zip(logprobs, response, strict=True)
            ],
        },
    }
