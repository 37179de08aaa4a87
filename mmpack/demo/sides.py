"""Both sides of the step: what an engine sampled, what the trainer makes of it, and whether they are the same."""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import mmpack as mp
from mmpack.adapters.transformers import rollout
from mmpack.adapters.transformers.load import load_checkpoint
from mmpack.demo.clips import clip_exercises
from mmpack.demo.datasets import Exercise, load_exercises
from mmpack.demo.options import SmokeOptions
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.demo.tiny_models import tiny_model
from mmpack.families import get_family

MAX_PIXELS = 256 * 28 * 28  # at most 256 vision tokens per picture: quick on two cores
CLIP_PIXELS = 16 * 28 * 28  # of a frame; Qwen3-VL bounds all frames together
CLIP_FRAMES = 12
FPS = 2.0  # frames taken per second


class Sides:
    """Exercises, a model and its processor; `rollouts` and `train`, one sample per response; `parity` of both."""

    def __init__(self, options: SmokeOptions, report: Any):
        self.options, self.report = options, report

    def __enter__(self) -> Self:
        torch.manual_seed(self.options.seed)
        kept = self.options.workdir  # else the traces lie in a temporary folder
        self.folder: Any = nullcontext(kept) if kept else tempfile.TemporaryDirectory()
        self.path = Path(self.folder.__enter__())
        self.path.mkdir(parents=True, exist_ok=True)
        self.exercises = self.load_exercises()
        self.messages = [as_messages(exercise) for exercise in self.exercises]
        self.model, self.hf_processor = self.load()
        self.processor = self.wrap(self.hf_processor)
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        self.report.say(f"{len(self.exercises)} problems, a model of {size:.1f} M parameters")
        return self

    def __exit__(self, *error: Any) -> None:
        self.folder.__exit__(*error)

    def load_exercises(self) -> list[Exercise]:
        if self.options.video:
            return clip_exercises(seed=self.options.seed)[: self.options.limit]
        return load_exercises(self.options.data, limit=self.options.limit)

    def load(self) -> tuple[Any, Any]:
        if self.options.model is not None:
            return load_checkpoint(self.options.model)
        return tiny_model(self.options.family, self.options.seed), self.tiny_processor()

    def tiny_processor(self) -> Any:
        family = self.options.family
        if not self.options.video:
            pixels = MAX_PIXELS // 8 if self.options.learn else MAX_PIXELS
        elif get_family(family).video_layout == "frames":
            pixels = CLIP_PIXELS * CLIP_FRAMES
        else:
            pixels = CLIP_PIXELS
        return qwen_vl_processor(family, min_pixels=4 * 28 * 28, max_pixels=pixels)

    def wrap(self, hf_processor: Any) -> Any:
        """The trainer's processor: messages and response ids in, a Sample out."""
        return mp.wrap_processor(hf_processor, video_settings=self.sampling)

    @property
    def sampling(self) -> dict[str, Any]:
        """How videos are sampled, on both sides."""
        return {"fps": FPS}

    def sample_responses(self) -> None:
        """What the engine sampled, and what it saw."""
        start = time.perf_counter()
        self.rollouts = self.roll()
        mp.write_trace(self.path / "rollout.jsonl", self.rollouts)
        tokens = sum(s.num_loss_tokens for s in self.rollouts)
        took = time.perf_counter() - start
        self.report.say(f"rollout: {len(self.rollouts)} responses, {tokens} tokens, {took:.1f} s")

    def roll(self) -> list[mp.Sample]:
        return self.sampled(
            slice(None),
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
            top_p=self.options.top_p,
        )

    def sampled(self, which: slice, **sampler: Any) -> list[mp.Sample]:
        """The engine's responses to the prompts of these exercises."""
        return rollout(
            self.model,
            self.hf_processor,
            self.messages[which],
            [p.exercise_id for p in self.exercises[which]],
            n=self.options.n,
            video_settings=self.sampling,
            **sampler,
        )

    @property
    def temperature(self) -> float:
        """Temperature of the logprobs that are compared and trained on: raw ones are the model's own."""
        raw = (self.rollouts[0].sampling or {}).get("logprobs") == "raw"
        return 1.0 if raw else self.options.temperature

    def build_train_side(self) -> None:
        """The same samples, from messages and response *ids*."""
        self.train = [self.train_sample(b) for b in range(len(self.rollouts))]
        mp.write_trace(self.path / "train.jsonl", self.train)

    def train_sample(self, b: int) -> mp.Sample:
        rolled = self.rollouts[b]
        return self.trained(
            b, self.messages[b // self.options.n], rolled.input_ids[rolled.loss_indices]
        )

    def trained(self, b: int, messages: Any, response: np.ndarray) -> mp.Sample:
        """What the trainer makes of the messages, and of the ids that were sampled, with their rewards."""
        rolled = self.rollouts[b]
        same_ids = len(response) == rolled.num_loss_tokens
        return self.processor(
            messages,
            response,
            sample_id=rolled.sample_id,
            group_id=rolled.group_id,
            rollout_logprobs=rolled.rollout_logprobs if same_ids else None,
            kept_ids=rolled.kept_ids if same_ids else None,
            sampling=rolled.sampling,
            finish_reason=rolled.finish_reason,
            rewards=self.score(self.exercises[b // self.options.n], response),
        )

    def score(self, exercise: Exercise, response: Any) -> list[mp.Score]:
        """An exact answer, a format part (a letter or a number, boxed or bare), and a small price for length."""
        text = self.hf_processor.tokenizer.decode(response.tolist(), skip_special_tokens=True)
        boxed = re.search(r"\\boxed\{([^{}]*)\}", text)
        answer = boxed.group(1).strip() if boxed else text.strip()
        formed = re.fullmatch(r"[A-D]|-?\d+(\.\d+)?", answer) is not None
        return [
            mp.Score("exact", float(answer in (exercise.answer, exercise.answer_letter))),
            mp.Score("format", 0.2 * formed),
            mp.Score("length", -len(text) / 10_000),
        ]

    def check_parity(self) -> None:
        """Layouts before numbers."""
        self.parity = report = mp.compare(self.path / "rollout.jsonl", self.path / "train.jsonl")
        values = self.report.values
        values["parity"] = {"ok": report.ok, "compared": report.compared}
        if report.first is not None:
            values["first"] = {
                "cause": report.first.cause,
                "sample_id": report.first.sample_id,
                "field": report.first.field,
                "message": str(report.first),
            }
        self.report.check("parity", report.ok, report.summary())
        for finding in report.findings[:3]:
            self.report.say(f"  {finding}")


def as_messages(exercise: Exercise) -> list[dict[str, Any]]:
    """Media first, then the question and its choices."""
    choices = "  ".join(
        f"{letter}. {c}" for letter, c in zip("ABCD", exercise.choices, strict=False)
    )
    ask = "Answer with the letter alone." if choices else "Answer with the value in \\boxed{}."
    parts: list[dict[str, Any]] = [{"type": "image", "image": i} for i in exercise.images]
    if exercise.video is not None:
        parts.append({"type": "video", "video": exercise.video})
    text = "\n".join(t for t in (exercise.prompt, choices, ask) if t)
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
