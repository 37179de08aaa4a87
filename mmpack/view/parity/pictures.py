"""A medium with the grid that the processor laid over it: the picture itself where its file is at hand, else its shape.

Files are opened below the root that the caller gives, and compared with the recorded content.
"""

from __future__ import annotations

from mmpack.parity.causes.pair import Pair, Side
from mmpack.schema.media import Medium
from mmpack.view.media import Find, data_uri
from mmpack.view.tags import Markup, tag

SHOWN = 4  # media of a sample
LONGEST = 220  # pixels of a thumbnail's longer side
CELLS = 80  # grid lines drawn along one side


def pictures(pair: Pair, find: Find) -> Markup:
    """The media of both sides, those of one index beside each other."""
    most = max(len(side.sample.media) for side in pair.sides)
    if not most:
        return Markup("")
    figures = [
        _figure(side, side.sample.media[i], i, find)
        for i in range(min(most, SHOWN))
        for side in pair.sides
        if i < len(side.sample.media)
    ]
    left_out = tag("p", f"{most - SHOWN} more media", class_="mm-note") if most > SHOWN else ""
    return tag("div", *figures, left_out, class_="mm-pictures")


def _figure(side: Side, medium: Medium, index: int, find: Find) -> Markup:
    t, h, w = medium.grid_thw
    merge = side.family.spatial_merge_size
    drawing, note = _drawing(medium, max(h // merge, 1), max(w // merge, 1), find)
    size = "" if medium.size is None else f"{medium.size[0]} × {medium.size[1]} px, "
    times = f"{t} × " if t > 1 else ""
    lines = [
        tag("b", f"{side.name} media[{index}]"),
        f" {medium.media_id}",
        tag("br"),
        f"{size}grid {times}{h // merge} × {w // merge} = {medium.num_tokens} tokens",
    ]
    if note:
        lines += [tag("br"), tag("span", note, class_="mm-note")]
    return tag("figure", drawing, tag("figcaption", *lines))


def _drawing(medium: Medium, rows: int, columns: int, find: Find) -> tuple[Markup, str]:
    picture, note = find(medium)
    ratio = columns / rows
    if picture is not None:
        ratio = picture.shape[1] / picture.shape[0]
    elif medium.size is not None and min(medium.size) > 0:
        ratio = medium.size[0] / medium.size[1]
    ratio = min(max(ratio, 0.05), 20.0)
    width, height = (LONGEST, LONGEST / ratio) if ratio >= 1 else (LONGEST * ratio, LONGEST)
    shape = {"width": f"{width:.1f}", "height": f"{height:.1f}"}
    back = (
        tag("rect", class_=f"mm-{medium.modality} mm-empty", **shape)
        if picture is None
        else tag("image", href=data_uri(picture, LONGEST), preserveAspectRatio="none", **shape)
    )
    path = "".join(
        [f"M{k * width / columns:.1f} 0V{height:.1f}" for k in _lines(columns)]
        + [f"M0 {k * height / rows:.1f}H{width:.1f}" for k in _lines(rows)]
    )
    # twice, dark on light: seen on any picture
    grid = [tag("path", d=path, class_=name) for name in ("mm-grid-back", "mm-grid")]
    box = f"0 0 {width:.1f} {height:.1f}"
    label = f"{medium.modality} with its grid of {rows} × {columns}"
    return tag("svg", back, *grid, view_box=box, role="img", aria_label=label, **shape), note


def _lines(cells: int) -> list[int]:
    step = max(-(-cells // CELLS), 1)
    return [*range(0, cells, step), cells]
