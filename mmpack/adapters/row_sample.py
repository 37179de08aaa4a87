"""One row of a framework as a Sample: its ids [L], its processed media, and which tokens are scored."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from mmpack.errors import LayoutError
from mmpack.families import Family
from mmpack.layout.fingerprint import fingerprint, response_hash
from mmpack.layout.occurrences import Placed, context_ids, spans_of
from mmpack.layout.runs import placeholder_runs, true_runs
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ObservationSpan


def row_sample(
    where: str,
    input_ids: np.ndarray,
    media: dict[str, list[Medium]],
    scored: np.ndarray,
    family: Family,
    *,
    response_start: int,
    processor: Processor | None = None,
    **fields: Any,
) -> Sample:
    """One row as a Sample: its media at their placeholders, its loss spans where `scored` says so.

    Args:
        where: begins errors; names the row.
        input_ids: int [L], no padding.
        media: by modality and in order, as `media_of_inputs` gives them.
        scored: bool [L]. What follows `response_start` and is not scored is an observation. A placeholder that is
            scored was sampled by the policy, and stands for no medium: `mp.validate` names it.
        response_start: token index at which the prompt ends.
        processor: whose settings are recorded.
        fields: further ones of Sample.

    Raises: LayoutError (MM104, MM107) where the numbers of placeholder runs and of media differ.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    placed = _placed(where, context_ids(ids, scored, family), media, family)
    distinct, spans = spans_of(placed, family)
    later = np.arange(len(ids)) >= response_start
    metadata = dict(fields.pop("metadata", {}))
    if processor is not None:
        settings = processor.settings
        fields |= {"processor": settings, "processor_fingerprint": fingerprint(settings)}
        if scored.any():
            written = ids[scored].tolist()
            metadata[RESPONSE_TEXT_KEY] = response_hash(
                processor.tokenizer.decode(written), written
            )
    loss = [LossSpan(a, b, turn=k) for k, (a, b) in enumerate(true_runs(scored))]
    observed = true_runs(later & ~scored)
    return Sample(
        family=family.name,
        input_ids=ids,
        media=distinct,
        modality_spans=spans,
        loss_spans=loss or [LossSpan(response_start, response_start, turn=0)],
        observation_spans=[
            ObservationSpan(a, b, "environment", sum(s.stop <= a for s in loss))
            for a, b in observed
        ]
        or None,
        attention_mask=np.ones(len(ids), dtype=np.int8),
        metadata=metadata,
        **fields,
    )


def response_start(sample: Sample) -> int:
    """Where the prompt of a sample ends that records no such place: at its first loss token or observation."""
    starts = [s.start for s in sample.loss_spans] + [
        s.start for s in sample.observation_spans or () if s.turn
    ]
    return min(starts, default=len(sample))


def prompt_group(sample: Sample, prompt_tokens: int) -> str:
    """A group id that rows of one prompt share: `prompt:<16 hex>`, a hash of the prompt's ids and media.

    Media that come later, a tool's, are the response's.
    """
    media = [sample.media[s.media_index] for s in sample.modality_spans if s.start < prompt_tokens]
    digest = hashlib.sha256(sample.input_ids[:prompt_tokens].tobytes())
    digest.update("".join(m.cache_key for m in media).encode())
    return f"prompt:{digest.hexdigest()[:16]}"


def continued_positions(prompt: np.ndarray, delta: int, length: int) -> np.ndarray:
    """int64 [rows, length]: the positions of a prompt [rows, P], then one step per token past the rope delta.

    Example:
        >>> import numpy as np
        >>> from mmpack.adapters.row_sample import continued_positions
        >>> continued_positions(np.array([[0, 1, 1], [0, 1, 2]]), -1, 5).tolist()
        [[0, 1, 1, 2, 3], [0, 1, 2, 2, 3]]
    """
    places = np.asarray(prompt, dtype=np.int64)
    steps = np.arange(places.shape[1], length) + int(delta)
    return np.concatenate([places, np.broadcast_to(steps, (len(places), len(steps)))], axis=1)


def _placed(
    where: str, context: np.ndarray, media: dict[str, list[Medium]], family: Family
) -> list[Placed]:
    """Each medium with its runs of the context's placeholders, in order of appearance."""
    found = placeholder_runs(context, family)
    out: list[Placed] = []
    for kind, own in media.items():
        runs = found.of(kind).bounds
        counts = [family.spans_of(kind, m.grid_thw) for m in own]
        if sum(counts) != len(runs):
            raise LayoutError(
                f"{where} has {len(runs)} runs of {kind} placeholders, its {len(own)} {kind} grids need "
                f"{sum(counts)}: a medium was dropped (dropped_image), or the policy sampled a placeholder "
                "(sampled_placeholder). Fix: keep each row with its own media, and placeholders out of the sampler",
                "MM104" if len(runs) > sum(counts) else "MM107",
            )
        rest = iter(runs)
        out += [(m, [next(rest) for _ in range(n)]) for m, n in zip(own, counts, strict=True)]
    return sorted(out, key=lambda placed: placed[1][0])
