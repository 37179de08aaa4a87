"""`mmpack frames VIDEO`: which frames of a video each policy takes, side by side, and as a contact sheet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mmpack.cli.output import JsonOption, OutOption, OutputFile, emit, table
from mmpack.errors import ArgumentError
from mmpack.files import replaced

if TYPE_CHECKING:
    from mmpack.video.frame_plan import FramePlan
    from mmpack.video.info import VideoInfo
    from mmpack.video.policies.base import Policy

SHOWN = 100  # frames, on the screen


def command(
    video: Path,
    policy: Annotated[list[str], typer.Option()],
    setting: Annotated[list[str] | None, typer.Option("--set")] = None,
    sheet: OutputFile = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Print which frames of a video each policy takes. Exits 1 if they differ.

    Args:
        video [VIDEO]: A video file.
        policy [NAME[:SETTING=VALUE,…]]: A sampling policy, e.g. qwen_vl_utils or vllm:model=qwen3_vl,fps=4; repeat
            the option to compare.
        setting [SETTING=VALUE]: A setting for every policy that has it.
        sheet [FILE.png]: Write a contact sheet to FILE.
    """
    from mmpack.video.choose_frames import sample
    from mmpack.video.compare_plans import differing_fields
    from mmpack.video.info import probe
    from mmpack.video.policies.registry import policy_of

    texts = [_policy(text) for text in policy]
    for name, text in _settings(setting or []).items():
        _set_for_all(texts, name, text)
    asked = [(name, _read(policy_of(name), settings)) for name, settings in texts]
    for name, settings in asked:
        policy_of(name).resolve(settings)  # before these are keywords of a call
    info = probe(str(video))
    plans = [sample(info, policy=name, **settings) for name, settings in asked]
    labels = list(policy)
    differing = differing_fields(plans)
    if sheet is not None:
        _write_sheet(sheet, video, info, labels, plans)
    emit(
        _document(video, info, labels, plans, differing),
        _for_people(info, labels, plans, differing),
        as_json,
        out,
    )
    return 1 if differing else 0


def _policy(text: str) -> tuple[str, dict[str, str]]:
    """`NAME` or `NAME:SETTING=VALUE,…`."""
    name, _, settings = text.partition(":")
    return name, _settings([part for part in settings.split(",") if part])


def _settings(texts: Sequence[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ArgumentError(f"frames: {text!r:.60} is not a setting. Fix: write SETTING=VALUE")
        if name in out:
            raise ArgumentError(f"frames: {name!r:.40} is set twice. Fix: set it once")
        out[name] = value
    return out


def _read(policy: Policy, texts: dict[str, str]) -> dict[str, Any]:
    """JSON numbers and booleans; texts of what is a text, or no JSON: transformers=5.8 is no number."""
    return {name: _value(policy.kinds.get(name, ""), text) for name, text in texts.items()}


def _value(kind: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if kind.startswith("str") and not isinstance(value, str | None) else value


def _set_for_all(asked: list[tuple[str, dict[str, str]]], name: str, value: str) -> None:
    from mmpack.video.policies.registry import policy_of

    having = [own for policy, own in asked if name in policy_of(policy).kinds]
    if not having:
        raise ArgumentError(
            f"frames: none of these policies has a setting {name!r:.40}. "
            "Fix: see docs/video.md for each policy's settings"
        )
    for own in having:
        own.setdefault(name, value)  # settings in the policy's name win


def _document(
    video: Path,
    info: VideoInfo,
    labels: Sequence[str],
    plans: Sequence[FramePlan],
    differing: list[str],
) -> dict[str, Any]:
    about = {
        name: getattr(info, name)
        for name in (
            "codec",
            "width",
            "height",
            "rotation",
            "fps",
            "total_frames",
            "variable",
            "duration",
            "content_key",
        )
    }
    return {
        "video": {"path": str(video), **about},
        "same": not differing,
        "differing": differing,
        "plans": [
            {
                "label": label,
                "num_frames": plan.num_frames,
                "num_tokens": plan.num_tokens,
                "resizes": [list(size) for size in plan.resizes],
                **plan.to_dict(),
            }
            for label, plan in zip(labels, plans, strict=True)
        ],
    }


def _about(info: VideoInfo) -> str:
    rate = "no frame rate" if info.fps is None else f"{info.fps:.6g} fps"
    more = ", variable" if info.variable else ""
    turned = f", turned by {info.rotation} degrees" if info.rotation else ""
    return (
        f"{info.codec}, {info.width} × {info.height} px{turned}, {info.total_frames} frames, "
        f"{rate}{more}, {info.duration:.2f} s"
    )


def _for_people(
    info: VideoInfo, labels: Sequence[str], plans: Sequence[FramePlan], differing: list[str]
) -> list[str | Table]:
    from mmpack.video.compare_plans import differing_rows

    rows = differing_rows(plans)
    marked = len(plans) > 1
    shown = [
        (k, *(_cell(plan, k, info.variable) for plan in plans), *(["≠" * differ] if marked else []))
        for k, differ in enumerate(rows[:SHOWN])
    ]
    out: list[str | Table] = [
        _about(info),
        "",
        table(("", *labels, *([""] if marked else [])), _facts(plans, marked)),
        "",
        table(("frame", *labels, *([""] if marked else [])), shown),
    ]
    if len(rows) > SHOWN:
        out.append(f"and {len(rows) - SHOWN} rows more (--json has all)")
    if marked:
        verdict = "the plans are the same"
        if differing:
            verdict = (
                f"the plans differ in {', '.join(differing)}; {sum(rows)} of {len(rows)} frames"
            )
        out += ["", verdict]
    return out


def _facts(plans: Sequence[FramePlan], marked: bool) -> list[tuple[str, ...]]:
    from mmpack.video.compare_plans import differ

    facts = {
        "frames": ("num_frames", lambda p: str(p.num_frames)),
        "reader": ("reader", lambda p: p.reader),
        "fps": ("fps", lambda p: f"{p.fps:.6g}" + (" (assumed)" if p.fps_assumed else "")),
        "resized to": ("resizes", lambda p: ", then ".join(map(_times, p.resizes)) or "-"),
        "grid": ("grid_thw", lambda p: _times(p.grid_thw)),
        "tokens": ("num_tokens", lambda p: f"{p.num_tokens:,}"),
        "second_per_grid_ts": ("second_per_grid_ts", lambda p: _number(p.second_per_grid_ts)),
        "timestamps in text": ("patch_timestamps", lambda p: _seconds(p.patch_timestamps)),
    }
    return [
        (name, *map(show, plans), *(["≠" if differ(plans, field) else ""] if marked else []))
        for name, (field, show) in facts.items()
    ]


def _cell(plan: FramePlan, k: int, variable: bool) -> str:
    """Number and time; of a clip of variable rate the real time too."""
    if k >= plan.num_frames:
        return "-"
    shown = f"{plan.indices[k]} at {plan.timestamps[k]:.3f} s"
    if variable and plan.container_timestamps is not None:
        shown += f" (really {plan.container_timestamps[k]:.3f} s)"
    return shown


def _times(numbers: Sequence[int]) -> str:
    return " × ".join(str(n) for n in numbers)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _seconds(seconds: Sequence[float] | None) -> str:
    if seconds is None:
        return "-"
    few = " ".join(f"{s:.1f}" for s in seconds[:3])
    return few if len(seconds) <= 4 else f"{few} … {seconds[-1]:.1f}"


def _write_sheet(
    path: Path, video: Path, info: VideoInfo, labels: Sequence[str], plans: Sequence[FramePlan]
) -> None:
    from mmpack.video.decoding import decode
    from mmpack.view.contact_sheet import contact_sheet
    from mmpack.view.figures import figure

    named = list(zip(labels, plans, strict=True))
    parts = contact_sheet(video.name, _about(info), named, lambda some: decode(str(video), some))
    with replaced(path, "output", ArgumentError) as file:
        file.write(figure(parts))
