"""The coordinate systems of boxes and points, and the way from one to another.

A number counts pixels of the picture as the model saw it (`absolute_pixels`: after the processor's resize), thousandths
or the whole of its side (`normalized_1000`, `normalized_1`), or pixels of the picture before resize
(`original_pixels`). All four begin at the top left corner, so each way is one factor per axis: a rational number.
Values are x, y, x, y, …; sizes are (width, height).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_name, kind_of
from mmpack.families import get_family
from mmpack.schema.media import Medium
from mmpack.schema.rules.places import NORMALIZED
from mmpack.schema.sample import COORDINATE_SYSTEMS, Sample

SYSTEMS = (*COORDINATE_SYSTEMS, "original_pixels")
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
Size = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one picture: (width, height) in pixels; None where it is not known.

    Example:
        >>> from mmpack.grounding import Sizes, convert
        >>> sizes = Sizes(model=(644, 476), original=(640, 480))
        >>> convert((322, 119), "absolute_pixels", "normalized_1000", sizes)
        (Fraction(500, 1), Fraction(250, 1))
    """

    model: Size | None = None  # as the model saw it, after resize
    original: Size | None = None  # before resize

    def __post_init__(self) -> None:
        for name in ("model", "original"):
            size = getattr(self, name)
            if size is not None and not _is_size(size):
                raise ArgumentError(
                    f"Sizes: {name} is {size!r:.60}, expected (width, height) of 1 or more. Fix: pass both in pixels"
                )

    def side(self, system: str) -> Size | None:
        """What the picture's whole width and height are in `system`; None where that is not known."""
        if system in NORMALIZED:
            return int(NORMALIZED[system]), int(NORMALIZED[system])
        return self.model if system == "absolute_pixels" else self.original


def sizes_of(sample: Sample, media_index: int | None = None) -> Sizes:
    """The sizes of a medium of a sample; without `media_index`, those of its only one.

    `model` follows from the grid: patches times the family's patch size. It is None for a picture in several tiles
    (InternVL), whose arrangement no grid records. `original` is the decoded file's size, upright where EXIF turned the
    picture; else what the processor was handed; else the sample's `screen_size`. It is None where nothing tells whether
    the picture was turned: what was handed on is square, or not known. A sample with several media, or none, and no
    `media_index` has only its screen.
    Raises: ArgumentError for a medium that isn't there; LayoutError for an unknown family.
    """
    if not isinstance(sample, Sample):
        raise ArgumentError(f"sizes_of: sample is {kind_of(sample)}. Fix: pass a Sample")
    screen = _size(sample.screen_size)
    if media_index is None:
        if len(sample.media) != 1:
            return Sizes(original=screen)
        media_index = 0
    if not isinstance(media_index, Integral) or not 0 <= int(media_index) < len(sample.media):
        raise ArgumentError(
            f"sizes_of: media_index is {media_index!r:.40}, but there are {len(sample.media)} media. "
            "Fix: pass an index into sample.media"
        )
    medium, family = sample.media[int(media_index)], get_family(sample.family)
    t, h, w = medium.grid_thw
    tiled = family.pixel_layout == "tiles" and t > 1
    model = (w * family.patch_size, h * family.patch_size)
    return Sizes(model=None if tiled else _size(model), original=_upright_size(medium, screen))


def convert(
    values: Iterable[Any], source: str, target: str, sizes: Sizes | None = None
) -> tuple[Fraction, ...]:
    """`values` of system `source` in system `target`, exactly.

    Args: `values`: x, y, x, y, … as int, float or Fraction; a float is taken as the binary number that it is. `source`,
    `target`: of `SYSTEMS`. `sizes`: of the picture, where pixels are read or written.
    Returns: Fractions; the way back gives `values` again, exactly. `float` rounds each once.
    Raises: ArgumentError for values that are no finite numbers or odd in number, an unknown system, or a size that is
    needed and not known.
    """
    numbers = _fractions(values)
    factors = _factors(source, target, sizes, len(numbers))
    return tuple(v * factor for v, factor in zip(numbers, factors, strict=True))


def as_floats(values: Iterable[Fraction]) -> tuple[float, ...]:
    """Return the nearest floats."""
    return tuple(float(v) for v in values)


# ---- parts ---------------------------------------------------------------------------------------


def _factors(source: str, target: str, sizes: Sizes | None, count: int) -> list[Fraction]:
    """What each of `count` values, x and y in turn, is multiplied by."""
    check_name("convert", "source", source, SYSTEMS)
    check_name("convert", "target", target, SYSTEMS)
    if source == target:
        return [Fraction(1)] * count
    one, two = _side(source, sizes), _side(target, sizes)
    return [Fraction(two[k % 2], one[k % 2]) for k in range(count)]


def _side(system: str, sizes: Sizes | None) -> Size:
    if sizes is not None and not isinstance(sizes, Sizes):
        raise ArgumentError(
            f"convert: sizes is {kind_of(sizes)}. Fix: pass Sizes(model=…, original=…)"
        )
    size = (sizes or Sizes()).side(system)
    if size is None:
        name = "model" if system == "absolute_pixels" else "original"
        raise ArgumentError(
            f"convert: {system} needs the picture's {name} size, which is not known. "
            f"Fix: pass sizes=Sizes({name}=(width, height))"
        )
    return size


def _fractions(values: Iterable[Any]) -> list[Fraction]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ArgumentError(f"convert: values is {kind_of(values)}. Fix: pass x, y, x, y, …")
    given = list(values)
    if len(given) % 2:
        raise ArgumentError(f"convert: {len(given)} values. Fix: pass pairs x, y")
    out = []
    for value in given:
        if isinstance(value, Rational | Integral):
            out.append(Fraction(int(value)) if isinstance(value, Integral) else Fraction(value))
        elif isinstance(value, Real) and np.isfinite(float(value)):
            out.append(Fraction(float(value)))
        else:
            shown = repr(value) if isinstance(value, Real) else kind_of(value)
            raise ArgumentError(f"convert: a value is {shown}. Fix: pass finite numbers")
    return out


def _upright_size(medium: Medium, screen: Size | None) -> Size | None:
    """The decoded file's size, turned if the picture was handed on turned; None where nothing tells that."""
    decoded, handed = _size(medium.decoded_size), _size(medium.size)
    if decoded is None:
        return handed or screen
    width, height = decoded
    if medium.exif_orientation not in TURNED or width == height:
        return decoded
    if handed is None or handed[0] == handed[1]:
        return None
    return decoded if (width > height) == (handed[0] > handed[1]) else (height, width)


def _size(size: Any) -> Size | None:
    return (int(size[0]), int(size[1])) if _is_size(size) else None


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(isinstance(v, Integral) and not isinstance(v, bool) and int(v) > 0 for v in size)
    )
