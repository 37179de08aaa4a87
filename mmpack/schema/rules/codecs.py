"""MM321 to MM323: ids of audio codecs."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.rules.topic import Found, Topic
from mmpack.schema.sample import Sample


def problems(sample: Sample, family: Family) -> Found:
    for i, audio in enumerate(sample.codec_ids or ()):
        field = f"codec_ids[{i}]"
        levels, frames = audio.codes.shape
        if levels != len(audio.codebook_sizes) or not levels or not frames:
            message = f"has ids [{levels}, {frames}] of {len(audio.codebook_sizes)} codebooks"
            yield "MM322", field, message, None
        else:
            sizes = np.array(audio.codebook_sizes)
            beyond = audio.codes.max(axis=1) >= sizes
            if beyond.any():
                level = int(beyond.argmax())
                frame = int(audio.codes[level].argmax())
                message = f"is {audio.codes[level, frame]}, its codebook has {audio.codebook_sizes[level]}"
                yield "MM321", f"{field}.codes[{level}][{frame}]", message, None
        if not audio.frame_rate > 0:
            yield "MM323", f"{field}.frame_rate", f"is {audio.frame_rate:g}", None


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    """Rows with codec ids are left to `problems`."""
    return ~table.present("codec_ids")


CODECS = Topic(
    codes=("MM321", "MM322", "MM323"),
    fields=("codec_ids",),
    problems=problems,
    valid=valid,
)
