"""`mmpack frames VIDEO`: which frames of a video each policy takes, side by side, and as a contact sheet."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mmpack.cli.output import OutputFile, Result, table
from mmpack.errors import ArgumentError
from mmpack.files import replaced

if TYPE_CHECKING:
    from mmpack.video.frame_plan import FramePlan
    from mmpack.video.info import VideoInfo

SHOWN = 100  # frames, on the screen
# of a VideoInfo, in the JSON document
ABOUT = (
    *("codec", "width", "height", "rotation", "fps", "total_frames", "variable", "duration"),
    "content_key",
)


def command(
    video: Path,
    policy: Annotated[list[str], typer.Option()],
    setting: Annotated[list[str] | None, typer.Option("--set")] = None,
    sheet: OutputFile = None,
) -> Result:
    """Print which frames of a video each policy takes. Exits 1 if they differ.

    Args:
        video [VIDEO]: A video file.
        policy [NAME[:SETTING=VALUE,…]]: A sampling policy, e.g. qwen_vl_utils or vllm:model=qwen3_vl,fps=4; repeat
            the option to compare.
        setting [SETTING=VALUE]: A setting for every policy that has it.
        sheet [FILE.png]: Write a contact sheet to FILE.

    Examples:
        mmpack frames clip.mp4 --policy qwen_vl_utils --policy vllm
    """
    from mmpack.video.choose_frames import sample
    from mmpack.video.compare_plans import differing_fields
    from mmpack.video.info import probe
    from mmpack.video.policies.registry import policy_of

    asked = []
    for text in policy:
        name, _, parts = text.partition(":")
        asked.append((policy_of(name), _settings([part for part in parts.split(",") if part])))
    for name, value in _settings(setting or []).items():
        having = [own for of, own in asked if name in of.kinds]
        if not having:
            raise ArgumentError(
                f"frames: none of these policies has a setting {name!r:.40}. "
                "Fix: see docs/video.md for each policy's settings"
            )
        for settings in having:
            settings.setdefault(name, value)  # settings in the policy's name win
    read = [{k: _value(of.kinds.get(k, ""), text) for k, text in own.items()} for of, own in asked]
    for (of, _), settings in zip(asked, read, strict=True):
        of.resolve(settings)  # before these are keywords of a call
    info = probe(str(video))
    plans = [sample(info, policy=of.name, **own) for (of, _), own in zip(asked, read, strict=True)]
    named = list(zip(policy, plans, strict=True))
    differing = differing_fields(plans)
    if sheet is not None:
        _write_sheet(sheet, video, info, named)
    document = {
        "video": {"path": str(video), **{name: getattr(info, name) for name in ABOUT}},
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
            for label, plan in named
        ],
    }
    return Result(document, _for_people(info, policy, plans, differing), bool(differing))


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


def _value(kind: str, text: str) -> Any:
    """JSON numbers and booleans; texts of what is a text, or no JSON: transformers=5.8 is no number."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if kind.startswith("str") and not isinstance(value, str | None) else value


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
    from mmpack.video.compare_plans import differ, differing_rows

    rows = differing_rows(plans)
    marked = len(plans) > 1

    def line(name: Any, cells: Sequence[str], unlike: bool) -> tuple[Any, ...]:
        return (name, *cells, *["≠" * unlike] * marked)

    shown = [
        line(k, [_cell(plan, k, info.variable) for plan in plans], unlike)
        for k, unlike in enumerate(rows[:SHOWN])
    ]
    facts = [
        line(name, [_fact(plan, field, show) for plan in plans], differ(plans, field))
        for name, (field, show) in FACTS.items()
    ]
    out: list[str | Table] = [
        _about(info),
        "",
        table(line("", labels, False), facts),
        "",
        table(line("frame", labels, False), shown),
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


def _fact(plan: FramePlan, field: str, show: Callable[[Any], str]) -> str:
    value = getattr(plan, field)
    assumed = " (assumed)" if field == "fps" and plan.fps_assumed else ""
    return "-" if value is None else show(value) + assumed


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


def _seconds(seconds: Sequence[float]) -> str:
    few = " ".join(f"{s:.1f}" for s in seconds[:3])
    return few if len(seconds) <= 4 else f"{few} … {seconds[-1]:.1f}"


FACTS: dict[str, tuple[str, Callable[[Any], str]]] = {  # of a plan: its field, and how it is shown
    "frames": ("num_frames", str),
    "reader": ("reader", str),
    "fps": ("fps", "{:.6g}".format),
    "resized to": ("resizes", lambda sizes: ", then ".join(map(_times, sizes)) or "-"),
    "grid": ("grid_thw", _times),
    "tokens": ("num_tokens", "{:,}".format),
    "second_per_grid_ts": ("second_per_grid_ts", "{:.6g}".format),
    "timestamps in text": ("patch_timestamps", _seconds),
}


def _write_sheet(
    path: Path, video: Path, info: VideoInfo, named: list[tuple[str, FramePlan]]
) -> None:
    from mmpack.video.decoding import decode
    from mmpack.view.contact_sheet import contact_sheet
    from mmpack.view.figures import figure

    parts = contact_sheet(video.name, _about(info), named, lambda some: decode(str(video), some))
    with replaced(path, "output", ArgumentError) as file:
        file.write(figure(parts))
