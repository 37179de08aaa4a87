"""trackio (0.43): samples as its `Trace`, messages with pictures, as the policy saw them.

Run with trackio 0.43.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np

from mmpack.errors import check_whole, require
from mmpack.layout.occurrences import occurrences
from mmpack.schema.rules import check
from mmpack.schema.sample import Sample
from mmpack.view.media import Find, finder

WHAT = "to_traces"
USER, ASSISTANT, TOOL = "user", "assistant", "tool"


def to_traces(
    samples: Iterable[Sample],
    decode: Callable[[Sequence[int]], str],
    *,
    pictures: Mapping[str, np.ndarray] | None = None,
    media_root: str | os.PathLike[str] | None = None,
    advantages: Mapping[str, float] | None = None,
    limit: int = 16,
) -> list[Any]:
    """`trackio.log({"rollouts": to_traces(samples, tokenizer.decode)}, step=k)`: the first `limit` samples.

    Tokens of the loss are the assistant's, observations a tool's, all else is the user's: the template's marks stand in
    its text. Pictures lie where their placeholders are, of a video the frame in the middle; one that is not found is a
    text that says why. Metadata: ids, tokens, turn, scores by name, versions of the weights, advantage.

    Args:
        decode: ids -> text.
        pictures: content_hash -> uint8 [h, w, 3] of pictures in memory, [n, h, w, 3] of the sampled frames of videos.
        media_root: folder below which the pictures that `Medium.source` names are opened.
        advantages: sample_id -> advantage.

    Raises: MissingExtraError without trackio; SchemaError for samples that break a rule; ArgumentError.
    """
    check_whole(WHAT, "limit", limit, least=1)
    trackio = require("trackio", "trackio", WHAT)
    find = finder(media_root, pictures)
    out = []
    for sample in islice(samples, limit):
        check([sample], WHAT)
        messages = list(_messages(sample, decode, find, trackio.Image))
        metadata = _metadata(sample)
        if sample.sample_id in (advantages or {}):
            metadata["advantage"] = float((advantages or {})[sample.sample_id])
        out.append(trackio.Trace(messages=messages, metadata=metadata))
    return out


def _messages(
    sample: Sample, decode: Callable[[Sequence[int]], str], find: Find, image: Callable[..., Any]
) -> Iterator[dict[str, Any]]:
    """One per run of tokens of one role; its content is a text, or parts where it has media."""
    roles = np.full(len(sample), USER, dtype=object)
    for who, spans in ((TOOL, sample.observation_spans or []), (ASSISTANT, sample.loss_spans)):
        for span in spans:
            roles[span.start : span.stop] = who
    starts = {o.start: sample.media[o.media_index] for o in occurrences(sample)}
    seen = np.zeros(len(sample), bool)  # tokens that stand for a medium
    for placed in sample.modality_spans:
        seen[placed.start : placed.stop] = True
    changes = (roles[1:] != roles[:-1]) | (seen[1:] != seen[:-1])
    edges = {0, len(sample), *(np.flatnonzero(changes) + 1).tolist(), *starts}
    cuts = sorted(edges)
    role: str | None = None
    parts: list[Any] = []
    for start, stop in pairwise(cuts):
        if roles[start] != role and parts:
            yield _message(role, parts)
            parts = []
        role = roles[start]
        if start in starts:
            parts.append(_picture(starts[start], find, image))
        if not seen[start]:
            text = decode(sample.input_ids[start:stop].tolist())
            parts.append({"type": "text", "text": text})
    if parts:
        yield _message(role, parts)


def _message(role: Any, parts: list[Any]) -> dict[str, Any]:
    texts = [part["text"] for part in parts if isinstance(part, dict)]
    whole = len(texts) == len(parts)
    return {"role": role, "content": "".join(texts) if whole else parts}


def _picture(medium: Any, find: Find, image: Callable[..., Any]) -> Any:
    pixels, why = find(medium)
    if pixels is None:
        about = f": {why}" if why else ""
        return {"type": "text", "text": f"[{medium.modality} {medium.media_id}{about}]"}
    name = f"{medium.media_id}, {medium.modality}"
    return image(np.ascontiguousarray(pixels), caption=f"{name}: {why}" if why else name)


def _metadata(sample: Sample) -> dict[str, Any]:
    trained = sample.num_loss_tokens
    names = ("sample_id", "group_id", "trajectory_id", "turn", "finish_reason")
    known = {name: getattr(sample, name) for name in names}
    out: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    out |= {"context_tokens": len(sample) - trained, "trained_tokens": trained}
    for kind in ("rewards", "costs", "verifiers"):
        for score in getattr(sample, kind) or []:
            name = f"{kind}/{score.name}"
            out[name] = out.get(name, 0.0) + float(score.value)  # of all that it scores
    if sample.policy_versions:
        versions = dict.fromkeys(str(v.version) for v in sample.policy_versions)
        out["policy_versions"] = list(versions)
    return out
