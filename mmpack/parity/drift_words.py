"""Plain English for drifts: a line for each axis that stands out, and no more than its numbers say."""

from __future__ import annotations

from collections.abc import Sequence

from mmpack.contracts import TOLERANCES
from mmpack.parity.drift_contrasts import Contrast, Found

NONE = TOLERANCES["engines_mean"].value  # a mean |d| that two engines in fp32 have
MANY = 0.99  # a share of weights that counts as all of them
_AFTER = {
    "after": "after a picture or video",
    "image": "after a picture",
    "video": "after a video",
    "near": "right after a picture or video",
    "near image": "right after a picture",
    "near video": "right after a video",
    "audio": "after an audio",
    "near audio": "right after an audio",
    "before": "before the first picture or video",
}
_SAMPLES = {
    "media": "in samples with pictures or video",
    "image": "in samples with pictures",
    "video": "in samples with video",
    "audio": "in samples with audio",
    "both": "in samples with pictures and video",
    "text": "in samples of text only",
}
_LOOK = {
    "after": "positions (mRoPE), pixels or the vision tower",
    "near": "the end of the medium: how embeddings are merged, the mask around it",
    "before medium": "not the media themselves: the prompt's text, or tokens that see what comes later",
    "media": "positions, pixels or the vision tower; and how samples with media are batched",
    "text": "the path of samples without media: how they are batched, their positions",
    "older": "stale weights: these tokens are not of the trainer's weights",
    "newer": "the weights sent since then: compare checksums",
    "one version": "the weights sent as that version: compare checksums",
    "later turns": "context that was encoded again between turns: compare the ids of each turn",
    "early turns": "what later turns no longer have: dropped reasoning, an evicted picture",
    "one turn": "what that turn has of its own: compare its ids",
    "position": "the KV cache or rotary positions (base, scaling, dtype)",
    "position limit": "a limit at that position: a window, rotary scaling, a chunk of prefill",
    "early position": "the beginning of the sample: system prompt, padding, the first attended token",
    "response": "the KV cache while decoding, or weights that changed while it was written",
    "early response": "where prompt and response meet: the last row of prefill, a template",
    "part": "what happens in that range",
    "length": "long samples: rotary scaling, a window, how they are batched",
    "short": "short samples: how they are batched or padded",
}


# what to look at where drift is late, where it is early, where it begins at a limit
_RANGES = {
    "position": ("position", "early position", "position limit"),
    "response": ("response", "early response", "response"),
    "length": ("length", "short", "length"),
}
_GROWS = {
    "position": "position",
    "response": "position in the response",
    "length": "the sample's length",
}


def suggestions(
    found: Sequence[Found],
    compared: Sequence[str],
    trainer: str | None,
    same: bool,
    few: str = "",
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A line by axis, and those of all together, the strongest first.

    Args: `compared`: axes of which two groups have enough tokens. `trainer`: its version. `same`: a drift of which
    nothing stands out is to be told. `few`: where a few samples have most of it, which.
    """
    lines: dict[str, str] = {}
    for one in found:
        lines[one.best.axis] = line(one.best, trainer)
        for other in one.as_good:
            lines[other.axis] = f"{line(other, trainer)} (as {one.best.axis} does: the same tokens)"
    together = tuple(lines.values())
    for one in found:
        for name in one.follows:
            lines.setdefault(name, f"stands out only as far as {found[0].best.axis} explains it")
    if not found and same and few:
        together = (few,)
    elif not found and same and compared:
        together = (
            f"not told apart by {', '.join(compared)}: look at what all tokens share: dtype, temperature, kernels",
        )
    return lines, together


def line(c: Contrast, trainer: str | None) -> str:
    """Where the drift is, how much of it, and what to look at."""
    where, look = _read(c, trainer)
    if c.kind in ("grows", "falls"):
        figures = f"{c.times:.3g} times over all; mean |Δ| {c.low:.1e} to {c.high:.1e}"
        return f"{where} ({figures}): look at {look}"
    size = "only" if c.low <= NONE else f"{c.times:.3g} times larger"
    figures = f"mean |Δ| {c.high:.1e}, elsewhere {c.low:.1e}"
    return f"{size} {where} ({figures}): look at {look}"


def few_samples(names: Sequence[str], all_of: int, share: float, high: float, low: float) -> str:
    """Name a few of the samples that have most of the drift, their share of all |d|, mean |d| there and elsewhere."""
    shown = ", ".join(f"{name!r:.60}" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    figures = f"mean |Δ| {high:.1e}, elsewhere {low:.1e}"
    return (
        f"mostly in {len(names)} of {all_of} samples, {shown}{more}: {share:.0%} of it ({figures}): look at them, "
        "and what they have that others don't"
    )


def _read(c: Contrast, trainer: str | None) -> tuple[str, str]:
    """Where a contrast's high side is, and what to look at."""
    names = [c.names[g] for g in c.groups]
    match c.axis:
        case "medium":
            key = "near" if c.kind.startswith("near") else c.kind
            look = {"near": "near", "before": "before medium"}.get(key, "after")
            return _AFTER[c.kind], _LOOK[look]
        case "modality":
            return _SAMPLES[c.kind], _LOOK["text" if c.kind == "text" else "media"]
        case "version":
            return _of_versions(c, names, trainer)
        case "turn":
            where = {"from": f"from turn {names[0]} on", "before": f"up to turn {names[-1]}"}
            look = {"from": "later turns", "before": "early turns"}.get(c.kind, "one turn")
            return where.get(c.kind, f"in turn {names[0]}"), _LOOK[look]
    late, early, limit = _RANGES[c.axis]
    look = {"grows": late, "falls": early, "from": limit, "before": early}.get(c.kind, "part")
    return _of_range(c, names), _LOOK[look]


def _of_range(c: Contrast, names: Sequence[str]) -> str:
    """Bins are named `3` or `3 to 7`."""
    low, high = names[0].split(" ")[0], names[-1].split(" ")[-1]
    if c.kind in ("grows", "falls"):
        return f"{c.kind} with {_GROWS[c.axis]}"
    if c.axis == "length":
        size = {"from": f"{low} tokens or more", "before": f"{high} tokens or fewer"}
        return f"in samples of {size.get(c.kind, f'{low} to {high} tokens')}"
    token = "token" if c.axis == "position" else "response token"
    where = {"from": f"from {token} {low} on", "before": f"up to {token} {high}"}
    return where.get(c.kind, f"at {token}s {low} to {high}")


def _of_versions(c: Contrast, names: Sequence[str], trainer: str | None) -> tuple[str, str]:
    """With the trainer's version, tokens of others are stale; without it only the order is known."""
    if c.kind == "alone" or (c.kind, len(names)) in (("from", 1), ("before", 1)):
        where = f"in tokens of version {names[0]}"
    else:
        where = f"from version {names[0]} on" if c.kind == "from" else f"up to version {names[-1]}"
    if trainer is not None and trainer in names:
        return where, _LOOK["newer" if c.kind == "from" else "one version"]
    if trainer is not None or c.kind == "before":
        return where, _LOOK["older"]
    return where, _LOOK["newer" if c.kind == "from" else "one version"]


def weights_line(level: str, plain: float, truncated: float, cut: float, high: float) -> str:
    """Say what the effective sample sizes mean for weights."""
    of = f"{level}s"
    text = f"weights keep {plain:.1%} of the {of}"
    if plain >= MANY:
        return f"{text}: a correction changes little"
    text += f", cut at {high:g} {truncated:.1%} (cuts {cut:.2%})"
    if truncated >= MANY:
        return f"{text}: a few large weights did it, and truncation mends it"
    if truncated < 0.5:
        return f"{text}: most of the batch is lost to the drift; mend it before you correct for it"
    return f"{text}: a correction adds variance"
