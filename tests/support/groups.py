"""Samples of groups: a prompt, maybe a picture, and an answer."""

from __future__ import annotations

from support.samples import make_sample

from mmpack.schema.sample import Sample


def answered(
    sample_id: str,
    group_id: str,
    prompt: list[int],
    answer: list[int],
    picture: tuple[int, int, int] | None = None,
) -> Sample:
    """`picture`: its grid; equal grids are one picture."""
    seen = [] if picture is None else [("image", picture, f"picture {picture}")]
    parts = [("text", prompt), *seen, ("response", answer)]
    return make_sample(parts, sample_id, group_id)
