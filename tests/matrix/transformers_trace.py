"""The matrix's trace of transformers: its processor's ids, grids and pixels, `get_rope_index`'s positions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from matrix.fixture import SAMPLING, Fixture, meta_model

from mmpack.adapters.processed_media import media_of_inputs, name_images
from mmpack.adapters.row_sample import row_sample
from mmpack.schema.sample import Sample


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    core = meta_model().model
    prompts = processed(fixture)
    out = []
    for number, response, logprobs in fixture.rows:
        prompt = prompts[number]
        start = prompt["input_ids"].shape[1]
        ids = torch.cat([prompt["input_ids"], torch.tensor([response])], dim=1)
        kinds = torch.cat(
            [prompt["mm_token_type_ids"], torch.zeros(1, len(response), dtype=torch.long)], dim=1
        )
        positions, _ = core.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=prompt["image_grid_thw"]
        )
        media = media_of_inputs(prompt, fixture.processor.family, "transformers")
        name_images(media, fixture.pictures[number], fixture.processor, "transformers")
        out.append(
            row_sample(
                "transformers",
                ids[0].numpy(),
                media,
                np.arange(ids.shape[1]) >= start,
                fixture.processor.family,
                response_start=start,
                processor=fixture.processor,
                sample_id="",
                group_id="",
                position_ids=positions[:, 0].numpy(),
                rollout_logprobs=np.asarray(logprobs, dtype=np.float32),
                sampling=dict(SAMPLING),
            )
        )
    return out


def processed(fixture: Fixture) -> list[dict[str, torch.Tensor]]:
    """What transformers' processor makes of each prompt: expanded ids [1, P], token types, pixels, grids."""
    return [
        dict(_process(fixture, text, images))
        for text, images in zip(fixture.texts, fixture.pictures, strict=True)
    ]


def _process(
    fixture: Fixture, text: str, images: list[object]
) -> Iterable[tuple[str, torch.Tensor]]:
    made = fixture.hf_processor(
        text=[text], images=images, return_tensors="pt", return_mm_token_type_ids=True
    )
    return [(k, torch.as_tensor(v)) for k, v in made.items()]
