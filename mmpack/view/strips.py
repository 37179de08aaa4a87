"""The tokens of a sample as a strip: what each is by colour, a line below those that the loss reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from mmpack.view.parts import MOST, WIDE, Box, Drawing
from mmpack.view.trace.roles import ROLES, Roles, Row, rows_of

HIGH, LINE = 18.0, 4.0  # of the strip, of the line below

# the class of each of ROLES on a page whose colours are those of modalities
BY_MODALITY = (
    "mm-text", "mm-image", "mm-video", "mm-observation", "mm-loss", "mm-loss", "mm-loss", "mm-audio"
)  # fmt: skip


def sample_strip(
    sample_id: str,
    roles: Roles,
    style: Callable[[int], str],
    longest: int = 0,
    shared: int = 0,
    high: float = HIGH,
) -> tuple[Drawing, int]:
    """The strip, and how many of its stretches are not drawn.

    Args: `style`: the class of each of ROLES. `longest`: tokens that the whole width stands for, else the sample's own.
        `shared`: how many of the first tokens are another sample's: paler.
    """
    rows = rows_of(roles, 0, (shared,))
    scale = WIDE / max(longest, len(roles.role), 1)
    shapes = [box for row in rows[: MOST // 3] for box in _boxes(row, scale, style, shared, high)]
    label = f"tokens of {sample_id} by what they are: {_counts(rows)}"
    return Drawing(shapes, high + LINE + 2, label), max(len(rows) - MOST // 3, 0)


def _boxes(
    row: Row, scale: float, style: Callable[[int], str], shared: int, high: float
) -> Iterator[Box]:
    about = f"{ROLES[row.role]}{', loss' if row.loss else ''}: tokens {row.start} to {row.stop}"
    for a, b in pairwise(row.cuts):
        pale = " mm-pale" if b <= shared else ""
        x, width = a * scale, max((b - a) * scale, 0.6)
        yield Box(x, 0, width, high, style(row.role) + pale, about)
        if row.loss:
            yield Box(x, high + 2, width, LINE, "mm-read" + pale)


def _counts(rows: list[Row]) -> str:
    """`61 prompt, 24 picture, 85 response; 85 in the loss`."""
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[ROLES[row.role]] = tokens.get(ROLES[row.role], 0) + row.stop - row.start
    read = sum(row.stop - row.start for row in rows if row.loss)
    return f"{', '.join(f'{n:,} {name}' for name, n in tokens.items())}; {read:,} in the loss"
