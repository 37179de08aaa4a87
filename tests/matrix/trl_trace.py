"""The matrix's trace of TRL: the batch that a real GRPOTrainer makes around the fixture's responses."""

from __future__ import annotations

import tempfile
from typing import Any

from matrix.fixture import SAMPLING, Fixture
from support.tiny_models import tiny_qwen2_5_vl

from mmpack.adapters.trl import to_samples
from mmpack.errors import require
from mmpack.schema.sample import Sample


def matrix_trace(fixture: Fixture) -> list[Sample]:
    """One sample per row of the fixture, in its order."""
    return to_samples(
        batch(fixture), fixture.hf_processor, images=fixture.images(), sampling=dict(SAMPLING)
    )


def batch(fixture: Fixture) -> dict[str, Any]:
    """`_generate_and_score_completions` of a GRPOTrainer; only what would be sampled is the fixture's."""
    import datasets

    trl = require("trl", "trl", "parity --matrix")
    trainer_class: Any = trl.GRPOTrainer

    class Fixed(trainer_class):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            sampled = [list(response) for _, response, _ in fixture.rows]
            return sampled, [list(logprobs) for _, _, logprobs in fixture.rows]

    rows = [
        {"prompt": [{"role": "user", "content": _question(messages)}], "images": images}
        for messages, images in zip(fixture.messages, fixture.pictures, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Fixed(
            model=tiny_qwen2_5_vl(),
            reward_funcs=_reward,
            args=trl.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=len(fixture.rows),
                num_generations=len(fixture.rows) // len(rows),
                max_completion_length=64,
                use_cpu=True,
                bf16=False,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=fixture.hf_processor,
        )
        inputs = [rows[number] for number, _, _ in fixture.rows]
        return dict(trainer._generate_and_score_completions(inputs))


def _question(messages: list[dict[str, Any]]) -> str:
    """The text of a prompt: TRL puts the pictures before it."""
    return str(messages[0]["content"][-1]["text"])


def _reward(completion_ids: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completion_ids)
