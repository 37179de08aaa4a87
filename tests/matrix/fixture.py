"""The matrix's fixture: a few drawn problems, and responses with logprobs that are the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmpack.demo.datasets import load_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.processors.wrap import Processor, wrap_processor

PROBLEMS = ("1", "2", "5", "9")  # RGB; one with two pictures
RESPONSES = 2
MAX_PIXELS = 64 * 28 * 28
END_OF_TURN = 151645  # <|im_end|>
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": "raw"}  # at 1.0 raw and processed are one


@dataclass(frozen=True)
class Fixture:
    """One entry per row of `rows`: prompt number, response ids, logprobs. `ids`: sample_id and group_id of each row."""

    hf_processor: Any
    processor: Processor
    messages: list[list[dict[str, Any]]]
    texts: list[str]  # rendered, one placeholder per picture
    pictures: list[list[Any]]
    rows: list[tuple[int, list[int], list[float]]]
    ids: list[tuple[str, str]]

    def images(self) -> list[list[Any]]:
        """The pictures of each row."""
        return [self.pictures[p] for p, _, _ in self.rows]


def make_fixture() -> Fixture:
    """The fixture for Qwen2.5-VL. Raises: MissingExtraError without Pillow or the vocabulary."""
    hf_processor = qwen_vl_processor("qwen2_5_vl", max_pixels=MAX_PIXELS)
    processor = wrap_processor(hf_processor)
    exercises = [p for p in load_exercises() if p.exercise_id in PROBLEMS]
    messages = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": i} for i in p.images]
                + [{"type": "text", "text": p.prompt}],
            }
        ]
        for p in exercises
    ]
    rows, ids = [], []
    for number, exercise in enumerate(exercises):
        for k in range(RESPONSES):
            draw = np.random.default_rng([number, k])
            count = 4 + 3 * k
            response = [*draw.integers(0, 1000, count).tolist(), END_OF_TURN]
            logprobs = (-draw.exponential(size=count + 1)).astype(np.float32).tolist()
            rows.append((number, response, logprobs))
            ids.append((f"{exercise.exercise_id}/{k}", exercise.exercise_id))
    return Fixture(
        hf_processor=hf_processor,
        processor=processor,
        messages=messages,
        texts=[processor.render(m) for m in messages],
        pictures=[list(p.images) for p in exercises],
        rows=rows,
        ids=ids,
    )


def meta_model() -> Any:
    """A Qwen2.5-VL without weights, whose `get_rope_index` is transformers' own."""
    from support.tiny_models import tiny_qwen2_5_vl

    with torch.device("meta"):
        return tiny_qwen2_5_vl()
