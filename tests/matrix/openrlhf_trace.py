"""The matrix's trace of OpenRLHF: prompts by its vlm_utils, an Experience as its samples generator makes one."""

from __future__ import annotations

from typing import Any

import torch
from matrix.fixture import SAMPLING, Fixture

from mmpack.adapters.openrlhf import to_samples
from mmpack.schema.sample import Sample


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    return to_samples(
        experience(fixture), fixture.processor, images=fixture.images(), sampling=dict(SAMPLING)
    )


def experience(fixture: Fixture) -> Any:
    """One Experience of all rows, joined and padded by OpenRLHF's own function."""
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.utils.vlm_utils import process_prompt_with_images

    rows = []
    for number, response, logprobs in fixture.rows:
        prompt, inputs, _ = process_prompt_with_images(
            fixture.hf_processor, fixture.texts[number], fixture.pictures[number]
        )
        ids = torch.tensor([prompt + response])
        actions = torch.zeros_like(ids)
        actions[:, len(prompt) :] = 1
        scores = torch.zeros(1, ids.shape[1])
        scores[:, len(prompt) :] = torch.tensor(logprobs)
        rows.append(
            Experience(
                sequences=ids,
                attention_mask=torch.ones_like(ids),
                action_mask=actions[:, 1:],
                rollout_log_probs=scores[:, 1:],
                prompts=[fixture.texts[number]],
                labels=[""],
                images=[None],
                mm_train_inputs=[inputs],
                response_length=torch.tensor([len(response)]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([float(ids.shape[1])]),
                info={"response_clip_ratio": torch.tensor([False])},
            )
        )
    pad_id = fixture.hf_processor.tokenizer.pad_token_id
    return Experience.concat_experiences(rows, pad_id)
