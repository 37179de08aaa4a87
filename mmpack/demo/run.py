"""Which job a smoke run is: the step, learning, or a step with a real engine; with a cause put in, or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from mmpack.demo.engine_job import EngineJob
from mmpack.demo.injection import Injecting
from mmpack.demo.job import Job
from mmpack.demo.learning_job import LearnJob
from mmpack.demo.options import ENGINE_CAUSES, SmokeOptions
from mmpack.demo.report import Report
from mmpack.errors import ArgumentError
from mmpack.files import write_text
from mmpack.layout.fingerprint import content_hash
from mmpack.processors.messages import parts_of
from mmpack.view import html

VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # seconds in positions, and seconds in text
OF_PICTURES = ("dropped_image", "max_pixels")  # causes


def run(options: SmokeOptions, console: Console | None = None, **engine: Any) -> Report:
    """Run the job of `options`; its checks, with their figures, are in the report. `engine`: see `EngineJob`.

    Raises: ArgumentError for options that contradict each other.
    """
    _check(options)
    if options.learn:
        options = replace(options, n=8, limit=min(options.limit or 8, 8), max_new_tokens=3)
    report = Report(console or Console())
    if not options.video or options.model is not None or options.engine != "transformers":
        _run(options, report, **engine)
        return report
    for family in VIDEO_FAMILIES:
        one = Report(report.console)
        one.say(f"{family}:")
        folder = None if options.workdir is None else options.workdir / family
        path = options.html and options.html.with_stem(f"{options.html.stem}-{family}")
        _run(replace(options, family=family, workdir=folder, html=path), one)
        report.values[family] = one.to_dict()
        report.failed += [f"{family}: {name}" for name in one.failed]
    return report


def _check(options: SmokeOptions) -> None:
    generates = options.engine == "transformers"
    if generates and options.top_p != 1.0:
        raise ArgumentError(
            "smoke: --top-p is for vLLM's sampler; with generate the check `kept ids` samples with top-p by itself. "
            "Fix: use --engine vllm, or leave it out"
        )
    if options.video and (options.data is not None or options.learn):
        raise ArgumentError(
            "smoke: --video draws its own clips and can't learn from them. Fix: leave out --data and --learn"
        )
    if options.video and options.inject in OF_PICTURES:
        raise ArgumentError(
            f"smoke: {options.inject} is a fault of pictures. Fix: leave out --video"
        )
    if options.learn and not generates:
        raise ArgumentError("smoke: --learn samples with generate. Fix: leave out --engine")
    if generates and options.inject in ENGINE_CAUSES:
        raise ArgumentError(f"smoke: {options.inject} needs a real engine. Fix: use --engine vllm")


def _run(options: SmokeOptions, report: Report, **engine: Any) -> None:
    with _job_class(options)(options, report, **engine) as job:
        job.run()
        if options.html is not None:
            write_text(options.html, page(job))


def _job_class(options: SmokeOptions) -> type[Job]:
    kind = LearnJob if options.learn else EngineJob if options.engine == "vllm" else Job
    if options.inject in (None, *ENGINE_CAUSES):  # EngineJob itself breaks what the last ones name
        return kind
    return type(f"Injecting{kind.__name__}", (Injecting, kind), {})


def page(job: Any) -> str:
    """The parity report of a job that has run, as one self-contained page."""
    pictures: dict[str, np.ndarray] = {}
    for messages in job.messages:
        for kind, item in parts_of(messages, None):
            if kind == "image":
                pixels, _ = job.processor.rgb_pixels(item, "smoke")
                pictures[content_hash("image", pixels)] = pixels
            else:
                clip = job.processor.clip(item, "smoke")
                pictures[clip.content_hash] = clip.frames
    logprobs = {}
    if hasattr(job, "old_logprobs"):  # parity held, so they were computed
        ends = np.cumsum([s.num_loss_tokens for s in job.train])[:-1]
        pieces = np.split(job.old_logprobs.numpy(), ends)
        logprobs = {s.sample_id: lp for s, lp in zip(job.train, pieces, strict=True)}
    return html(
        job.parity,
        pictures=pictures,
        decode=job.hf_processor.tokenizer.decode,
        train_logprobs=logprobs,
    )
