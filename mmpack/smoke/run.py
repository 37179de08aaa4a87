"""Which job a smoke run is: the step, learning, or a step with a real engine; with a cause put in, or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from mmpack.errors import ArgumentError
from mmpack.files import write_text
from mmpack.smoke.injecting_job import Injecting
from mmpack.smoke.injection import CAUSES
from mmpack.smoke.job import Job
from mmpack.smoke.options import ENGINE_CAUSES, SmokeOptions
from mmpack.smoke.page import page
from mmpack.smoke.report import Report

VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # seconds in positions, and seconds in text
OF_PICTURES = ("dropped_image", "max_pixels")  # causes


def run(options: SmokeOptions, console: Console | None = None, **engine: Any) -> Report:
    """Run the job of `options`; its checks, with their figures, are in the report. `engine`: see `EngineJob`."""
    if options.engine == "transformers" and options.top_p != 1.0:
        raise ArgumentError(
            "smoke: with --top-p the scores of generate are of a distribution that was cut. "
            "Fix: --engine vllm, whose logprobs are raw"
        )
    if options.video and (options.data is not None or options.learn):
        raise ArgumentError("smoke: clips are drawn, and not learned. Fix: drop --data and --learn")
    if options.video and options.inject in OF_PICTURES:
        raise ArgumentError(f"smoke: {options.inject} is put into pictures. Fix: drop --video")
    kind = _kind(options)
    if options.learn:
        options = replace(options, n=8, limit=min(options.limit or 8, 8), max_new_tokens=3)
    report = Report(console or Console())
    if not options.video or options.model is not None or options.engine != "transformers":
        _run(kind, options, report, **engine)
        return report
    for family in VIDEO_FAMILIES:
        one = Report(report.console)
        one.say(f"{family}:")
        folder = None if options.workdir is None else options.workdir / family
        html = options.html and options.html.with_stem(f"{options.html.stem}-{family}")
        _run(kind, replace(options, family=family, workdir=folder, html=html), one)
        report.values[family] = one.to_dict()
        report.failed += [f"{family}: {name}" for name in one.failed]
    return report


def _run(kind: type[Job], options: SmokeOptions, report: Report, **engine: Any) -> None:
    with kind(options, report, **engine) as job:
        job.run()
        if options.html is not None:
            write_text(options.html, page(job))


def _kind(options: SmokeOptions) -> type[Job]:
    kind = Job
    if options.learn:
        if options.engine != "transformers":
            raise ArgumentError("smoke: --learn samples with generate. Fix: drop --engine")
        from mmpack.smoke.learning_job import LearnJob

        kind = LearnJob
    elif options.engine == "vllm":
        from mmpack.smoke.engine_job import EngineJob

        if options.inject in ENGINE_CAUSES:
            return EngineJob
        kind = EngineJob
    elif options.inject is not None and options.inject not in CAUSES:
        raise ArgumentError(f"smoke: {options.inject} needs a real engine. Fix: --engine vllm")
    if options.inject is None:
        return kind
    return type(f"Injecting{kind.__name__}", (Injecting, kind), {})
