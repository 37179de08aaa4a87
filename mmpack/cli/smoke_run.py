"""Which job a smoke run is: the step, learning, or a step with a real engine; with a cause put in, or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from mmpack.adapters.transformers.inject import CAUSES
from mmpack.cli.geo3k_grpo import Job, SmokeOptions
from mmpack.cli.output import write_text
from mmpack.cli.smoke_html import page
from mmpack.cli.smoke_inject import Injecting
from mmpack.cli.smoke_report import Report
from mmpack.errors import ArgumentError


def run(options: SmokeOptions, console: Console | None = None, **engine: Any) -> Report:
    """Run the job of `options`; its checks, with their figures, are in the report. `engine`: see `EngineJob`."""
    if options.engine == "transformers" and options.top_p != 1.0:
        raise ArgumentError(
            "smoke: with --top-p the scores of generate are of a distribution that was cut. "
            "Fix: --engine vllm, whose logprobs are raw"
        )
    kind = _kind(options)
    if options.learn:
        options = replace(options, n=8, limit=min(options.limit or 8, 8), max_new_tokens=3)
    report = Report(console or Console())
    with kind(options, report, **engine) as job:
        job.run()
        if options.html is not None:
            write_text(options.html, page(job))
    return report


def _kind(options: SmokeOptions) -> type[Job]:
    kind = Job
    if options.learn:
        if options.engine != "transformers":
            raise ArgumentError("smoke: --learn samples with generate. Fix: drop --engine")
        from mmpack.cli.smoke_learn import LearnJob

        kind = LearnJob
    elif options.engine == "vllm":
        from mmpack.cli.smoke_engine import ENGINE_CAUSES, EngineJob

        if options.inject in ENGINE_CAUSES:
            return EngineJob
        kind = EngineJob
    elif options.inject is not None and options.inject not in CAUSES:
        raise ArgumentError(f"smoke: {options.inject} needs a real engine. Fix: --engine vllm")
    if options.inject is None:
        return kind
    return type(f"Injecting{kind.__name__}", (Injecting, kind), {})
