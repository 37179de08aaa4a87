"""`mmpack inspect TRACE`: what a trace holds, or the spans of one of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mmpack.cli.output import Result, TraceArgument, problem_document, table
from mmpack.errors import ArgumentError
from mmpack.progress import tracked

if TYPE_CHECKING:
    from mmpack.schema.media import Medium
    from mmpack.schema.sample import Sample

PLACE = ("field", "start", "stop")  # of a span
SPANS = (
    "modality_spans",
    "loss_spans",
    "observation_spans",
    "action_spans",
    "region_spans",
    "policy_versions",
)


def command(trace: TraceArgument, sample: str | None = None) -> Result:
    """Show what a trace holds. Broken rules are counted, and don't change the exit code.

    Args:
        sample [ID]: List the media and spans of this sample.

    Examples:
        mmpack inspect rollout.jsonl
        mmpack inspect rollout.jsonl --sample s0
    """
    from mmpack.schema.trace import read_trace

    samples = tracked(read_trace(trace), "reading")
    if sample is None:
        counts = _counts(samples)
        return Result(counts, [_counts_table(counts)])
    for found in samples:
        if found.sample_id == sample:
            document = _one(found)
            return Result(document, _one_for_people(document))
    raise ArgumentError(
        f"inspect: {trace} has no sample {sample!r}. Fix: pass a sample_id of this trace"
    )


def _counts(samples: Iterable[Sample]) -> dict[str, Any]:
    from mmpack.schema.rules import problems_of

    names = ("samples", "tokens", "loss_tokens", "media", "videos", "video_frames", "patches")
    totals, heard, replay = Counter(dict.fromkeys(names, 0)), Counter[str](), Counter[str]()
    families, fingerprints, broken = Counter[str](), Counter[str](), Counter[str]()
    groups: set[str] = set()
    patches_of: dict[str, int] = {}
    for sample in samples:
        videos, sounds = ([m for m in sample.media if m.modality == k] for k in ("video", "audio"))
        totals.update(
            samples=1,
            tokens=len(sample),
            loss_tokens=sample.num_loss_tokens,
            media=len(sample.media),
            videos=len(videos),
            video_frames=sum(_frames(m) or 0 for m in videos),
            patches=sample.num_patches,
        )
        if sounds:
            heard.update(audio=len(sounds), audio_frames=sum(m.grid_thw[0] for m in sounds))
        groups.add(sample.group_id)
        patches_of |= {m.cache_key: m.num_patches for m in sample.media}
        replay.update(_replay_counts(sample))
        families[sample.family] += 1
        fingerprints[sample.processor_fingerprint or "not recorded"] += 1
        broken.update(problem.code for problem in problems_of(sample))
    return {
        **totals,
        **heard,
        "groups": len(groups),
        "distinct_media": len(patches_of),
        "distinct_patches": sum(patches_of.values()),
        **({"replay": dict(replay)} if replay else {}),
        "families": dict(families.most_common()),
        "processor_fingerprints": dict(fingerprints.most_common()),
        "broken_rules": dict(sorted(broken.items())),
    }


def _replay_counts(sample: Sample) -> dict[str, int]:
    """What there is to be replayed: how many samples have it, ids in all, bytes of routes."""
    out: dict[str, int] = {}
    if sample.kept_ids is not None:
        out |= {"samples with kept_ids": 1, "kept ids": len(sample.kept_ids.ids)}
    for name, lists in (sample.teachers or {}).items():
        out |= {f"samples with teacher {name}": 1, f"ids of teacher {name}": len(lists.ids)}
    if sample.routed_experts is not None:
        out |= {"samples with routed_experts": 1, "bytes of routes": sample.routed_experts.nbytes}
    return out


def _counts_table(counts: dict[str, Any]) -> Table:
    rows: list[tuple[str, Any]] = []
    for name, value in counts.items():
        if isinstance(value, dict):
            rows += [(f"{name}: {key}", count) for key, count in value.items()] or [(name, 0)]
        else:
            rows.append((name, value))
    return table(("what", "count"), rows)


def _one(sample: Sample) -> dict[str, Any]:
    from mmpack.schema.replay_figures import replay_figures
    from mmpack.schema.rules import problems_of

    spans = [
        {"field": f"{name}[{i}]", **span.to_dict(numpy=True)}
        for name in SPANS
        for i, span in enumerate(getattr(sample, name) or ())
    ]
    return {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "family": sample.family,
        "tokens": len(sample),
        "loss_tokens": sample.num_loss_tokens,
        "patches": sample.num_patches,
        "processor_fingerprint": sample.processor_fingerprint,
        "media": [
            {
                "media_id": m.media_id,
                "modality": m.modality,
                "grid_thw": list(m.grid_thw),
                "num_tokens": m.num_tokens,
                "cache_key": m.cache_key,
                **({"video": _video(sample, m)} if m.modality == "video" else {}),
                **({"audio": _audio(m)} if m.modality == "audio" else {}),
            }
            for m in sample.media
        ],
        **({"replay": found} if (found := replay_figures(sample)) else {}),
        "spans": sorted(spans, key=lambda s: (s["start"], s["stop"])),
        "problems": [problem_document(p) for p in problems_of(sample)],
    }


def _one_for_people(document: dict[str, Any]) -> list[str | Table]:
    out: list[str | Table] = [
        f"sample {document['sample_id']} of group {document['group_id']} ({document['family']}): "
        f"{document['tokens']} tokens, {document['loss_tokens']} loss tokens, {document['patches']} patches"
    ]
    media = list(enumerate(document["media"]))
    replay = dict(document.get("replay", {}))
    replay |= {f"teacher {name}": of for name, of in replay.pop("teachers", {}).items()}
    tables: list[tuple[tuple[str, ...], list[tuple[Any, ...]]]] = [
        (
            ("media", "id", "modality", "grid", "tokens"),
            [(i, m["media_id"], m["modality"], m["grid_thw"], m["num_tokens"]) for i, m in media],
        )
    ]
    for kind in ("video", "audio"):
        found = [(i, m[kind]) for i, m in media if kind in m]
        head = (kind, *(name.replace("_", " ") for name in found[0][1])) if found else ()
        tables.append((head, [(i, *of.values()) for i, of in found]))
    tables += [
        (("to be replayed", "figures"), [(name, _pairs(of)) for name, of in replay.items()]),
        (
            ("start", "stop", "span", "about"),
            [(s["start"], s["stop"], s["field"], _pairs(s, but=PLACE)) for s in document["spans"]],
        ),
    ]
    for head, rows in tables:
        if rows:
            out += ["", table(head, rows)]
    out += [
        f"{p['code']} {p['field']} {p['message']}. Fix: {p['fix']}" for p in document["problems"]
    ]
    return out


def _pairs(of: dict[str, Any], but: tuple[str, ...] = ()) -> str:
    return ", ".join(f"{k}={v}" for k, v in of.items() if k not in but)


def _frames(medium: Medium) -> int | None:
    """How many were sampled; None if neither their indices nor their times were recorded."""
    lists = (medium.frame_indices, medium.frame_timestamps)
    return next((len(listed) for listed in lists if listed is not None), None)


def _audio(medium: Medium) -> dict[str, Any]:
    """What was recorded of an audio."""
    rate, count = medium.sampling_rate, medium.num_samples
    return {
        "num_samples": count,
        "sampling_rate": rate,
        "seconds": round(count / rate, 3) if count is not None and rate else None,
        "hop_length": medium.hop_length,
        "frames": medium.grid_thw[0],
    }


def _video(sample: Sample, medium: Medium) -> dict[str, Any]:
    """What was recorded of a video; `seconds`: of the whole file, total_frames / fps."""
    from mmpack.parity.frame_difference import sampling_of

    fps, total, times = medium.fps, medium.total_frames, medium.frame_timestamps
    return {
        "frames": _frames(medium),
        "total_frames": total,
        "fps": fps,
        "seconds": total / fps if total is not None and fps else None,
        "first_timestamp": times[0] if times else None,
        "last_timestamp": times[-1] if times else None,
        "second_per_grid_ts": medium.second_per_grid_ts,
        "size": None if medium.size is None else list(medium.size),
        "policy": sampling_of(sample.processor, medium).get("policy"),
    }
