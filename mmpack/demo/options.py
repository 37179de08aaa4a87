"""The options of a smoke run, in one table: `mmpack smoke` makes its command line from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mmpack.parity.fixes import Injected

# the last three need a real engine: they are put into its weights, its dtype or its positions
Cause = Literal[Injected, "dtype", "position_rule", "stale_weights"]
ENGINE_CAUSES = tuple(cause for cause in get_args(Cause) if cause not in get_args(Injected))

MAX_SEED = 2**63 - 1  # torch takes no larger one


def option(default: Any, help: str, **limits: Any) -> Any:
    """A field, what `--help` says of it, and what the command line refuses (by the names of typer.Option)."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass
class SmokeOptions:
    """Fields that `option` makes are options of the command, by their own names."""

    data: str | None = option(
        None, "Geometry3K: a folder, a parquet file or a hub name. Default: drawn problems."
    )
    video: bool = option(False, "Use clips: their questions need the order in time.")
    model: str | None = option(
        None, "A checkpoint's name or path. Default: a tiny model with random weights."
    )
    engine: Literal["transformers", "vllm"] = option(
        "transformers",
        "What samples responses: transformers' generate, or a real vLLM engine on this machine.",
    )
    n: int = option(4, "Responses per prompt.", min=1)
    seed: int = option(0, "Seed for weights, sampling and order.", min=0, max=MAX_SEED)
    max_new_tokens: int = option(24, "Tokens per response, at most.", min=1)
    temperature: float = option(1.0, "Sampling temperature.", min=0.01)
    top_p: float = option(1.0, "Top-p of vLLM's sampler.", min=0.01, max=1.0)
    limit: int | None = option(None, "Use only the first N problems.", min=1)
    workdir: Path | None = option(
        None,
        "Keep rollout.jsonl and train.jsonl here. Default: a temporary folder, removed.",
        file_okay=False,
    )
    inject: Cause | None = option(
        None, "Break one side on purpose; the run must then name the cause."
    )
    learn: bool = option(False, "Afterwards take more steps, and check that the reward rises.")
    negate_advantages: bool = option(False, "The reward must fall.", hidden=True)
    html: Path | None = None  # a page of the parity report
    family: str = "qwen2_5_vl"  # of the tiny model
