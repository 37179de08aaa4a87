"""Rows of problems as data frameworks hold them, and the samples that a processor makes of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image
from support.same import assert_equal


def problem_rows(count: int) -> list[dict[str, Any]]:
    """Three answers for each picture."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        if i % 3 == 0:
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(file, "png")
        parts = [{"type": "image", "text": None}, {"type": "text", "text": "How many?"}]
        rows.append(
            {
                "messages": [{"role": "user", "content": parts}],
                "images": [file.getvalue()],
                "response_ids": rng.integers(0, 1000, 2 + i % 4).tolist(),
                "rollout_logprobs": (-rng.random(2 + i % 4, np.float32)).tolist(),
                "sample_id": f"s{i}",
                "group_id": f"g{i // 3}",
                "answer": str(i),
            }
        )
    return rows


def samples_of_rows(rows: list[dict[str, Any]], processor: Any) -> list[Any]:
    """By the processor itself, row by row."""
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    names = ("response_ids", "rollout_logprobs", "sample_id", "group_id")
    return [
        processor(
            [{"role": "user", "content": content}],
            media=row["images"],
            metadata={"answer": row["answer"]},
            **{name: row[name] for name in names},
        )
        for row in rows
    ]


def assert_samples(found: Any, wanted: Any) -> None:
    """Equal, pixels included."""
    found, wanted = list(found), list(wanted)
    assert found == wanted
    pixels = [[np.asarray(m.pixel_values) for s in x for m in s.media] for x in (found, wanted)]
    assert_equal(*pixels)


def batches_of(loader: Any) -> list[Any]:
    return [(b.sample_ids, b.input_ids, b.pixel_values) for step in loader for b in step]
