"""Command lines that `--help` and the manual page show; a test runs or parses each."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "smoke": ("mmpack smoke", "mmpack smoke --inject max_pixels --html report.html"),
    "parity": (
        "mmpack parity rollout.jsonl train.jsonl",
        "mmpack parity rollout.jsonl train.jsonl --format github",
    ),
    "explain": ("mmpack explain MM101", "mmpack explain max_pixels"),
    "probe": (
        "mmpack probe 'tiny:qwen2_5_vl?layout=padded' 'tiny:qwen2_5_vl?layout=packed'",
        "mmpack probe hf:checkpoint --trace train.jsonl --save a.probe",
    ),
    "validate": ("mmpack validate rollout.jsonl",),
    "convert": ("mmpack convert rollout.jsonl rollout.parquet",),
    "inspect": ("mmpack inspect rollout.jsonl", "mmpack inspect rollout.jsonl --sample s0"),
    "init": ("mmpack init loop", "mmpack init trl experiment"),
    "view": (
        "mmpack view rollout.jsonl --media-root screens",
        "mmpack view plan.json -o plan.html --png plan.png",
        "mmpack view report.json",
        "mmpack view rollout.jsonl --pack",
    ),
    "plan": (
        "mmpack plan train.jsonl --max-tokens 4096 --share-prefix --ranks 2 --save plan.json",
        "mmpack plan train.jsonl --model config.json --memory 40GB --auto-share",
    ),
    "frames": ("mmpack frames clip.mp4 --policy qwen_vl_utils --policy vllm",),
    "doctor": ("mmpack doctor", "mmpack doctor --json"),
    "schema": ("mmpack schema", "mmpack schema --check sample.schema.json"),
}


def epilog(name: str) -> str:
    """What `--help` of a command ends with."""
    lines = EXAMPLES[name]
    return "\n\n".join([f"Example{'s' if len(lines) > 1 else ''}:", *lines])
