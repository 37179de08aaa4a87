"""The matrix's trace of vime and slime: dicts of their documented fields, as their rollout fills them."""

from __future__ import annotations

from typing import Any

from matrix.fixture import SAMPLING, Fixture
from matrix.transformers_trace import processed

from mmpack.adapters.vime import to_samples
from mmpack.schema.sample import Sample


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    return to_samples(items(fixture), fixture.processor, sampling=dict(SAMPLING))


def items(fixture: Fixture) -> list[dict[str, Any]]:
    """`Sample.to_dict` of every row."""
    prompts = processed(fixture)
    return [
        {
            "group_index": number,
            "index": i,
            "prompt": fixture.texts[number],
            "tokens": prompts[number]["input_ids"][0].tolist() + response,
            "multimodal_inputs": {"images": fixture.pictures[number]},
            "multimodal_train_inputs": {
                name: prompts[number][name] for name in ("pixel_values", "image_grid_thw")
            },
            "response": fixture.hf_processor.tokenizer.decode(response),
            "response_length": len(response),
            "loss_mask": [1] * len(response),
            "rollout_log_probs": logprobs,
            "weight_versions": ["0"],
            "status": "completed",
            "metadata": {},
        }
        for i, (number, response, logprobs) in enumerate(fixture.rows)
    ]
