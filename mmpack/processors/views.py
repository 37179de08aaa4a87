"""A picture that is cut into views, the whole and its slices row by row: each view is a medium of its own.

Grids are (1, h, w) patches. `view` in a medium's metadata is [k, rows, columns]: the k-th view in the text, of so many
rows and columns of slices.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mmpack.errors import LayoutError
from mmpack.families import Family
from mmpack.layout.fingerprint import cache_key
from mmpack.processors.pixels import Cut
from mmpack.schema.media import Medium

VIEW = "view"


def media_of_cut(
    made: Cut, content: str, part: dict[str, Any] | None, family: Family, known: dict[str, Any]
) -> list[Medium]:
    """One medium per view. `content`: the picture's content hash, the first view's; `known`: of where it came from."""
    if len(made.grids) == 1:
        pixels = [made.pixel_values]  # equal pictures share one array, by identity
    else:
        pixels = np.split(made.pixel_values, np.cumsum([math.prod(g) for g in made.grids[:-1]]))
    out = []
    for k, grid in enumerate(made.grids):
        own = content if not k else hashlib.sha256(f"{content} view {k}".encode()).hexdigest()
        about = dict(known)
        if family.views is not None:
            view = {VIEW: [k, made.rows, made.columns]}
            about["metadata"] = view | (about.get("metadata") or {} if not k else {})
        if k:
            about["size"] = (grid[2] * family.patch_size, grid[1] * family.patch_size)
        medium = Medium(
            media_id=f"image:{content[:16]}" + (f"/{k}" if k else ""),
            modality="image",
            cache_key=cache_key(own, grid, part),
            grid_thw=grid,
            num_tokens=made.tokens or family.vision_tokens(grid),
            content_hash=own,
            **about,
        )
        medium.pixel_values = pixels[k]
        out.append(medium)
    return out


def pictures(media: Iterable[Medium]) -> list[list[Medium]]:
    """Media in order of appearance, by picture: a medium that is no view is one of its own, a video has its sound.

    Raises: LayoutError (MM106) for views that are no whole pictures.
    """
    out: list[list[Medium]] = []
    for medium in media:
        if medium.in_video and out:
            out[-1].append(medium)
            continue
        k, rows, columns = _view_of(medium)
        if k == 0:
            out.append([medium])
        elif out and _view_of(out[-1][-1]) == (k - 1, rows, columns):
            out[-1].append(medium)
        else:
            raise _broken(medium)
    for views in out:
        _, rows, columns = _view_of(views[0])
        if len(views) != 1 + rows * columns and not views[-1].in_video:
            raise _broken(views[-1])
    return out


def counted(media: Iterable[Medium]) -> Counter[str]:
    """How many pictures (and videos) these media are, by modality."""
    return Counter(views[0].modality for views in pictures(media))


def text_of(views: Sequence[Medium], pad: str, family: Family, number: int | None) -> str:
    """What stands for a picture or a video: each view's placeholder, once, within its markers.

    `number`: None: not written. A video's frames are whole views, one after the other.
    """
    about = family.views
    assert about is not None
    first = views[0]
    start, end = about.whole
    whole = f"{start}{pad}{end}" * family.spans_of(first.modality, first.grid_thw)
    if number is not None and about.number is not None:
        whole = f"{about.number[0]}{number}{about.number[1]}{whole}"
    _, rows, columns = _view_of(first)
    one = f"{about.slice[0]}{pad}{about.slice[1]}"
    lines = [
        "".join(one.format(row=row, column=column) for column in range(1, columns + 1))
        for row in range(1, rows + 1)
    ]
    slices = about.row_end.join(lines)
    if about.whole_last is None or not slices:
        return whole + slices
    return slices + about.whole_last + whole


def _view_of(medium: Medium) -> tuple[int, int, int]:
    found = medium.metadata.get(VIEW, (0, 0, 0))
    try:
        k, rows, columns = (int(n) for n in found)
    except (TypeError, ValueError, OverflowError):
        raise _broken(medium) from None
    return k, rows, columns


def _broken(medium: Medium) -> LayoutError:
    return LayoutError(
        f"processor: {medium.media_id!r:.60} is view {medium.metadata.get(VIEW)!r:.40} of a picture (k, rows, "
        "columns), but the picture's other views are not next to it. Fix: pass all views of a picture, in order",
        "MM106",
    )
