"""`mmpack smoke --engine vllm`: the step with a real engine as the rollout and transformers, packed, as the trainer.

In addition to the step's own checks: drift of the engine's raw logprobs, new weights in the running engine, one row for
each way to run it (prefix cache, media cache, chunked prefill, one or many in a batch), and the ratio over the ids that
an engine of processed logprobs kept. A video is among the prompts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.transformers.load import load_checkpoint
from mmpack.adapters.vllm import VllmEngine
from mmpack.adapters.vllm.engine import load_vllm
from mmpack.contracts import TOLERANCES
from mmpack.demo.clips import clip_exercises
from mmpack.demo.datasets import Exercise
from mmpack.demo.job import Job
from mmpack.demo.options import SmokeOptions
from mmpack.demo.tiny_models import tiny_model
from mmpack.parity.drift import LogprobDrift, logprob_drift
from mmpack.processors.wrap import Processor

MEASURED = ("dtype", "max_pixels", "position_rule")  # their drift is shown, too
CHUNK = 64  # tokens of a prefill step: cuts every prompt, and through pictures


class EngineJob(Job):
    """`make_engine(checkpoint, **settings)` starts an engine; it is closed when the job ends."""

    bound = TOLERANCES["engines_max"].value

    def __init__(
        self,
        options: SmokeOptions,
        report: Any,
        make_engine: Callable[..., VllmEngine] = VllmEngine,
    ):
        super().__init__(options, report)
        load_vllm()
        self.make_engine = make_engine
        self.version = "0"

    def load_exercises(self) -> list[Exercise]:
        exercises = super().load_exercises()
        return exercises if self.options.video else [*exercises, *clip_exercises(1)]

    def __exit__(self, *error: Any) -> None:
        try:
            self.engine.close()
        finally:
            super().__exit__(*error)

    def run(self) -> None:
        super().run()
        if self.report.failed == ["parity"] and self.options.inject in MEASURED:
            self.check_drift("drift")
        if self.report.ok:
            self.send_weights()
            self.check_after_step()
        if self.report.ok:
            self.compare_settings()
        if self.report.ok:
            self.restart(None, caching=True, media=True, kept_ids=True)
            super().check_kept_ids()

    def check_kept_ids(self) -> None:
        """Not in the midst of the step: it takes an engine of its own, whose logprobs are processed."""

    # -- model, processor, engine: of one checkpoint ------------------------------------------------------------------

    def load(self) -> tuple[Any, Any]:
        checkpoint = self.options.model
        with tempfile.TemporaryDirectory() as folder:
            if checkpoint is None:
                checkpoint = folder
                tiny_model(self.options.family, self.options.seed).save_pretrained(folder)
                self.tiny_processor().save_pretrained(folder)
            model, hf_processor = load_checkpoint(checkpoint)  # says what is wrong with it
            self.engine = self.start_engine(checkpoint)
        self.engine.load_weights(model.state_dict(), self.version)
        return model, hf_processor

    def start_engine(self, checkpoint: str | Path, **settings: Any) -> VllmEngine:
        start = time.perf_counter()
        dtype = "bfloat16" if self.options.inject == "dtype" else "float32"
        engine = self.make_engine(checkpoint, dtype=dtype, video_settings=self.sampling, **settings)
        took = time.perf_counter() - start
        self.report.say(f"engine: {engine.about['name']} {engine.about['version']}, {took:.0f} s")
        return engine

    def wrap(self, hf_processor: Any) -> Processor:
        """Positions by the engine's rule: the trainer follows what sampled."""
        broken = self.options.inject == "position_rule"
        rule = "grid" if broken else self.engine.processor.parts.position_rule
        return mp.wrap_processor(hf_processor, position_rule=rule, video_settings=self.sampling)

    def sampled(self, which: slice, **sampler: Any) -> list[mp.Sample]:
        names = [p.exercise_id for p in self.exercises[which]]
        return self.engine.rollout(self.messages[which], names, n=self.options.n, **sampler)

    # -- drift: the engine's raw logprobs against the trainer's -------------------------------------------------------

    def check_logprobs(self) -> None:
        super().check_logprobs()
        self.check_drift("drift")

    def check_drift(self, name: str) -> None:
        drift = self.drift(self.rollouts, self.train)
        self.report.values[name] = drift.to_dict()
        self.report.check(name, drift.ok and not drift.causes, str(drift))

    def drift(self, rollouts: list[mp.Sample], train: list[mp.Sample]) -> LogprobDrift:
        logprobs, likeliest = self.raw_logprobs(train)
        dtype = str(self.model.dtype).removeprefix("torch.")
        return logprob_drift(
            rollouts,
            logprobs,
            argmax_ids=likeliest,
            dtype=dtype,
            version=self.version,
            checksums=self.engine.weight_checksums(self.model.state_dict()),
            routed_experts=[s.routed_experts for s in train],  # replayed
        )

    @torch.no_grad()
    def raw_logprobs(self, samples: list[mp.Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Raw logprobs and likeliest ids of each sample's loss tokens: packed, with shared prefixes."""
        logprobs: list[Any] = [None] * len(samples)
        likeliest: list[Any] = [None] * len(samples)
        limit = max(1024, max(len(s) for s in samples))
        for members in mp.plan(samples, max_tokens=limit, share_prefix=True).bins:
            batch = mp.pack([samples[i] for i in members], share_prefix=True)
            with attach(self.model):
                inputs = model_inputs(batch, self.model)
                logits = self.model(**inputs, logits_to_keep=batch.loss_rows).logits[0]
            found: Any = mp.selected_logprobs(logits, batch.loss_targets)
            pieces = batch.unpack_loss(found)
            best = batch.unpack_loss(logits.argmax(dim=-1))
            for i, piece, ids in zip(members, pieces, best, strict=True):
                logprobs[i], likeliest[i] = piece.numpy(), ids.numpy()
        return logprobs, likeliest

    # -- weights: into the running engine, and checked by tensor ------------------------------------------------------

    def step(self) -> None:
        self.before = {name: t.clone() for name, t in self.model.state_dict().items()}
        super().step()

    def send_weights(self) -> None:
        tensors = dict(self.model.state_dict())
        self.version = "1"
        if self.options.inject == "stale_weights":
            stale = [name for name in tensors if name.endswith("down_proj.weight")][-1]
            tensors[stale] = self.before[stale]
        self.engine.load_weights(tensors, self.version)
        unlike = self.engine.unlike_weights(dict(self.model.state_dict()))
        self.report.values["weights"] = {"tensors": len(tensors), "unlike": unlike}
        found = f"{len(tensors) - len(unlike)} of {len(tensors)} tensors are the trainer's"
        named = f"; stale: {', '.join(unlike)}" if unlike else ""
        self.report.check("weights", not unlike, found + named)

    def check_after_step(self) -> None:
        """The rollout of the new weights: layouts again, and drift again."""
        self.rollouts = self.roll()
        self.train = [self.train_sample(b) for b in range(len(self.rollouts))]
        report = mp.compare(self.rollouts, self.train)
        self.report.check("parity after the step", report.ok, report.summary())
        self.check_drift("drift after the step")

    # -- ways to run the engine: the same table, a row each -----------------------------------------------------------

    def compare_settings(self) -> None:
        rows = []
        for chunk, caching in product((None, CHUNK), (True, False)):
            if (chunk, caching) != (None, True):  # which runs already
                self.restart(chunk, caching, media=caching == (chunk is None))
            for together in (True, False):
                rows.append(self.row(chunk, caching, together))
        self.report.values["engines"] = rows
        columns = ["prefix cache", "media cache", "chunks", "batch", "tokens", "cached", "hits"]
        columns += ["max", "mean", "k3", "argmax", "seconds"]
        self.report.table(columns, [shown(row) for row in rows])
        fine = all(row["ok"] for row in rows)
        worst = max(row["max_abs"] for row in rows)
        self.report.check("engine settings", fine, f"{len(rows)} rows, largest {worst:.1e}")

    def restart(self, chunk: int | None, caching: bool, media: bool, **more: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            self.hf_processor.save_pretrained(folder)
            self.engine.close()
            settings = {"prefix_caching": caching, **more} | (
                {} if media else {"media_cache_gb": 0}
            )
            self.engine = self.start_engine(folder, chunked_prefill=chunk, **settings)
        self.engine.load_weights(self.model.state_dict(), self.version)

    def row(self, chunk: int | None, caching: bool, together: bool) -> dict[str, Any]:
        """The last three prompts, the video among them, from an empty cache."""
        self.engine.reset_prefix_cache()
        before = self.engine.media_cache_hits()
        start = time.perf_counter()
        rollouts = self.sampled(
            slice(-3, None),
            max_new_tokens=min(8, self.options.max_new_tokens),
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            together=together,
        )
        took = time.perf_counter() - start
        train = [self.as_train(sample) for sample in rollouts]
        cached = [s.prefix_cached_tokens or 0 for s in rollouts]
        return {
            "prefix_cache": caching,
            "media_cache": self.engine.about["media_cache"],
            "chunked_prefill": chunk,
            "batch": len(rollouts) if together else 1,
            "prefix_cached_tokens": cached,
            "media_cache_hits": self.engine.media_cache_hits() - before,
            "seconds": took,
            **self.drift(rollouts, train).to_dict(),
        }


def shown(row: dict[str, Any]) -> list[str]:
    share = "n/a" if row["argmax_differs"] is None else f"{row['argmax_differs']:.2%}"
    return [
        *("on" if row[name] else "off" for name in ("prefix_cache", "media_cache")),
        "off" if row["chunked_prefill"] is None else str(row["chunked_prefill"]),
        str(row["batch"]),
        str(row["tokens"]),
        str(sum(row["prefix_cached_tokens"])),
        str(row["media_cache_hits"]),
        *(f"{row[name]:.1e}" for name in ("max_abs", "mean_abs", "k3")),
        share,
        f"{row['seconds']:.1f}",
    ]
