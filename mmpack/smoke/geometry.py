"""A small set of geometry problems in the style of Geometry3K, drawn with Pillow to scale, their answers computed.

Points are complex numbers with y upwards, in the problem's own units until a figure is fitted into its picture. All is
drawn with one-pixel lines between whole pixels, letters too, so that every Pillow draws the same pixels.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmpack.errors import require
from mmpack.smoke.exercise import Exercise

if TYPE_CHECKING:
    from PIL import Image, ImageDraw


def draw_exercises() -> list[Exercise]:
    """16 problems in order of id; pictures from 120×90 to 1200×700 pixels, three problems with two.

    The same pixels at every call. Raises: MissingExtraError without Pillow.
    """
    return [drawing.exercise for drawing in drawings()]


@dataclass(frozen=True, eq=False)
class Drawing:
    """A problem, its kind by Geometry3K's names, what is drawn, and where (pixels of each point, y downwards)."""

    exercise: Exercise
    graph: str
    goal: str
    figures: tuple[Figure, ...]
    positions: tuple[dict[str, tuple[int, int]], ...]


def drawings() -> list[Drawing]:
    """The problems of `draw_exercises`, with what Geometry3K's data.json says of them."""
    return [_drawn(str(i), draft) for i, draft in enumerate(_drafts(), start=1)]


@dataclass(frozen=True)
class Figure:
    """What one picture shows. A point of a lower-case name carries no letter; "BAC" is the angle at A."""

    size: tuple[int, int]  # width, height in pixels
    points: dict[str, complex]
    lines: tuple[str, ...]  # pairs of points
    angles: dict[str, str] = field(default_factory=dict)  # three points to label
    lengths: dict[str, str] = field(default_factory=dict)  # two points to label
    circles: dict[str, float] = field(default_factory=dict)  # centre to radius
    # point to where its letter lies; else outwards
    names: dict[str, complex] = field(default_factory=dict)
    caption: str = ""
    mode: str = "RGB"


@dataclass(frozen=True)
class _Draft:
    graph: str
    goal: str
    prompt: str
    answer: float
    # what a wrong method gives: the other choices, at least three of them distinct
    mistakes: tuple[float, ...]
    figures: tuple[Figure, ...]


def _drafts() -> list[_Draft]:
    return [
        _third_angle((120, 90), 52, 61),
        _hypotenuse((320, 240), 9, 12),
        _inscribed_angle((300, 300), 96),
        _transversal((640, 360), 118),
        _similar_triangles((280, 210), (420, 300), (6, 8, 9), 5 / 3),
        _leg((400, 300), 26, 10),
        _chord((500, 420), 13, 5),
        _exterior_angle((360, 200), 48, 57),
        _two_circles((200, 200), (330, 260), 5, 8),
        _base_angle((224, 336), 40),
        _third_angle((1200, 700), 35, 102),
        _parallelogram((353, 212), 73),
        _circumference((240, 200), 6),
        _congruent_triangles((317, 229), (260, 180), 58, 49),
        _diagonal((448, 252), 15, 8),
        _central_angle((250, 251), 37),
    ]


# ---------------------------------------------------------------- problems


def _third_angle(size: tuple[int, int], a: float, b: float) -> _Draft:
    c = 180 - a - b
    labels = {"BAC": _degrees(a), "ABC": _degrees(b), "ACB": "x°"}
    figure = Figure(size, _triangle(a, b), ("AB", "BC", "CA"), angles=labels)
    return _Draft("Triangle", "Angle", "Find x.", c, (a + b, 90 - a, 90 - b, c + 10), (figure,))


def _base_angle(size: tuple[int, int], apex: float) -> _Draft:
    base = (180 - apex) / 2
    figure = Figure(
        size,
        _triangle(base, base),
        ("AB", "BC", "CA"),
        angles={"ACB": _degrees(apex), "BAC": "x°"},
    )
    prompt = "In the triangle, A C = B C. Find x."
    return _Draft(
        "Triangle", "Angle", prompt, base, (apex, 180 - apex, 90 - apex, base + 5), (figure,)
    )


def _exterior_angle(size: tuple[int, int], a: float, c: float) -> _Draft:
    b = 180 - a - c
    points = _triangle(a, b)
    points["D"] = points["B"] + 0.5
    labels = {"BAC": _degrees(a), "ACB": _degrees(c), "CBD": "x°"}
    figure = Figure(size, points, ("AD", "BC", "CA"), angles=labels)
    return _Draft(
        "Triangle", "Angle", "Find m \\angle C B D.", a + c, (b, 180 - a, 180 - c), (figure,)
    )


def _congruent_triangles(
    first: tuple[int, int], second: tuple[int, int], a: float, b: float
) -> _Draft:
    c = 180 - a - b
    points = _triangle(a, b)
    turned = {name: -points[old] for name, old in zip("DEF", "ABC", strict=True)}
    figures = (
        Figure(
            first,
            points,
            ("AB", "BC", "CA"),
            angles={"BAC": _degrees(a), "ABC": _degrees(b)},
            caption="FIGURE 1",
        ),
        Figure(second, turned, ("DE", "EF", "FD"), angles={"DFE": "x°"}, caption="FIGURE 2"),
    )
    prompt = "\\triangle A B C in Figure 1 is congruent to \\triangle D E F in Figure 2. Find x."
    return _Draft("Triangle", "Angle", prompt, c, (a, b, 180 - c), figures)


def _similar_triangles(
    first: tuple[int, int], second: tuple[int, int], sides: tuple[float, float, float], scale: float
) -> _Draft:
    ab, bc, ca = sides
    at_a = math.degrees(math.acos((ab * ab + ca * ca - bc * bc) / (2 * ab * ca)))
    points = {"A": 0j, "B": complex(ab), "C": _polar(ca, at_a)}
    larger = {name: scale * points[old] for name, old in zip("DEF", "ABC", strict=True)}
    figures = (
        Figure(
            first,
            points,
            ("AB", "BC", "CA"),
            lengths={"AB": _number(ab), "CA": _number(ca)},
            caption="FIGURE 1",
        ),
        Figure(
            second,
            larger,
            ("DE", "EF", "FD"),
            lengths={"DE": _number(ab * scale), "FD": "x"},
            caption="FIGURE 2",
        ),
    )
    prompt = "\\triangle A B C in Figure 1 is similar to \\triangle D E F in Figure 2. Find x."
    wrong = (ca + ab * scale - ab, ca / scale, ca * scale + 1)
    return _Draft("Triangle", "Length", prompt, ca * scale, wrong, figures)


def _hypotenuse(size: tuple[int, int], a: float, b: float) -> _Draft:
    points = {"A": complex(0, a), "B": complex(b), "C": 0j}
    labels = {"CA": _number(a), "BC": _number(b), "AB": "x"}
    figure = Figure(size, points, ("AB", "BC", "CA"), angles={"ACB": "90°"}, lengths=labels)
    wrong = (a + b, math.hypot(a, b) + 1, b + 1, abs(b - a))
    return _Draft("Triangle", "Length", "Find x.", math.hypot(a, b), wrong, (figure,))


def _leg(size: tuple[int, int], hypotenuse: float, a: float) -> _Draft:
    b = math.sqrt(hypotenuse**2 - a**2)
    points = {"P": complex(0, a), "Q": complex(b), "R": 0j}
    labels = {"RP": _number(a), "PQ": _number(hypotenuse), "QR": "y"}
    figure = Figure(size, points, ("PQ", "QR", "RP"), angles={"PRQ": "90°"}, lengths=labels)
    return _Draft(
        "Triangle", "Length", "Find y.", b, (hypotenuse - a, hypotenuse + a, b + 2), (figure,)
    )


def _diagonal(size: tuple[int, int], width: float, height: float) -> _Draft:
    points = {"A": 0j, "B": complex(width), "C": complex(width, height), "D": complex(0, height)}
    labels = {"AB": _number(width), "BC": _number(height)}
    figure = Figure(size, points, ("AB", "BC", "CD", "DA", "AC"), lengths=labels, mode="L")
    diagonal = math.hypot(width, height)
    wrong = (width + height, 2 * (width + height), diagonal + 1)
    return _Draft(
        "Rectangle", "Length", "A B C D is a rectangle. Find A C.", diagonal, wrong, (figure,)
    )


def _parallelogram(size: tuple[int, int], a: float) -> _Draft:
    side = _polar(0.9, a)
    points = {"M": 0j, "N": 1.6 + 0j, "P": 1.6 + side, "Q": side}
    labels = {"NMQ": _degrees(a), "MNP": "x°"}
    figure = Figure(size, points, ("MN", "NP", "PQ", "QM"), angles=labels, mode="RGBA")
    prompt = "Find x so that M N P Q is a parallelogram."
    return _Draft("Parallelogram", "Angle", prompt, 180 - a, (a, 90 - a, 90 + a), (figure,))


def _transversal(size: tuple[int, int], a: float) -> _Draft:
    slope = _polar(1, a)
    low, high = 0j, slope / slope.imag  # the distance of the lines is 1
    points = {
        "A": low,
        "B": high,
        "C": low + 1.4,
        "D": high + 1.4,
        "p": low - 1.4,
        "q": high - 1.4,
        "r": low - 0.6 * slope,
        "s": high + 0.6 * slope,
    }
    labels = {"CAB": _degrees(a), "DBA": "x°"}
    between = {"A": _polar(1, 180 + a / 2), "B": _polar(1, a / 2)}
    figure = Figure(size, points, ("pC", "qD", "rs"), angles=labels, names=between)
    prompt = "A C is parallel to B D. Find x."
    return _Draft("Line", "Angle", prompt, 180 - a, (a, a - 90, 180 - a / 2), (figure,))


def _inscribed_angle(size: tuple[int, int], central: float) -> _Draft:
    labels = {"AOB": _degrees(central), "ACB": "x°"}
    wrong = (central, 180 - central, 90 - central / 2)
    return _Draft(
        "Circle", "Angle", "Find x.", central / 2, wrong, (_on_circle(size, central, labels),)
    )


def _central_angle(size: tuple[int, int], inscribed: float) -> _Draft:
    labels = {"AOB": "x°", "ACB": _degrees(inscribed)}
    wrong = (inscribed, 180 - inscribed, 90 - inscribed)
    figure = _on_circle(size, 2 * inscribed, labels)
    return _Draft("Circle", "Angle", "In \\odot O, find x.", 2 * inscribed, wrong, (figure,))


def _chord(size: tuple[int, int], radius: float, distance: float) -> _Draft:
    half = math.sqrt(radius**2 - distance**2)
    foot = complex(0, -distance)
    points = {"O": 0j, "M": foot, "A": foot - half, "B": foot + half}
    labels = {"OA": _number(radius), "OM": _number(distance)}
    figure = Figure(size, points, ("AB", "OA", "OM"), lengths=labels, circles={"O": radius})
    prompt = "In \\odot O, O M is perpendicular to A B. Find A B."
    wrong = (half, 2 * radius, radius + distance, 2 * half + 1)
    return _Draft("Circle", "Length", prompt, 2 * half, wrong, (figure,))


def _circumference(size: tuple[int, int], radius: float) -> _Draft:
    points = {"O": 0j, "A": _polar(radius, 20)}
    figure = Figure(size, points, ("OA",), lengths={"OA": _number(radius)}, circles={"O": radius})
    values = [round(math.pi * v, 1) for v in (2 * radius, radius, radius**2, 4 * radius)]
    prompt = "Find the circumference of \\odot O to the nearest tenth."
    return _Draft("Circle", "Length", prompt, values[0], tuple(values[1:]), (figure,))


def _two_circles(
    first: tuple[int, int], second: tuple[int, int], radius: float, other: float
) -> _Draft:
    figures = tuple(
        Figure(
            size,
            {centre: 0j, end: _polar(r, 35)},
            (centre + end,),
            lengths={centre + end: _number(r)},
            circles={centre: r},
            caption=caption,
        )
        for size, centre, end, r, caption in (
            (first, "P", "A", radius, "FIGURE 1"),
            (second, "Q", "B", other, "FIGURE 2"),
        )
    )
    prompt = (
        "How much longer is a diameter of \\odot Q in Figure 2 than one of \\odot P in Figure 1?"
    )
    answer = 2 * (other - radius)
    wrong = (other - radius, other + radius, 2 * (other + radius))
    return _Draft("Circle", "Length", prompt, answer, wrong, figures)


def _triangle(a: float, b: float) -> dict[str, complex]:
    """A, B and C, counter-clockwise, with A B = 1 and angles in degrees at A and B."""
    side = math.sin(math.radians(b)) / math.sin(math.radians(a + b))
    return {"A": 0j, "B": 1 + 0j, "C": _polar(side, a)}


def _on_circle(size: tuple[int, int], central: float, labels: dict[str, str]) -> Figure:
    ends = {"A": _polar(1, 270 - central / 2), "B": _polar(1, 270 + central / 2)}
    points = {"O": 0j, "C": _polar(1, 80), **ends}
    lines = ("OA", "OB", "CA", "CB")
    return Figure(size, points, lines, angles=labels, circles={"O": 1.0})


def _polar(radius: float, degrees: float) -> complex:
    return cmath.rect(radius, math.radians(degrees))


def _number(value: float) -> str:
    return f"{value:g}"


def _degrees(value: float) -> str:
    return f"{value:g}°"


def _drawn(exercise_id: str, draft: _Draft) -> Drawing:
    answer = _number(draft.answer)
    wrong = list(
        dict.fromkeys(_number(v) for v in draft.mistakes if v > 0 and _number(v) != answer)
    )
    choices = tuple(sorted([answer, *wrong[:3]], key=float))
    pictures = [_picture(figure) for figure in draft.figures]
    exercise = Exercise(
        exercise_id=exercise_id,
        prompt=draft.prompt,
        images=tuple(image for image, _ in pictures),
        answer=answer,
        choices=choices,
        answer_letter="ABCD"[choices.index(answer)],
        source="mmpack.smoke.geometry",
    )
    positions = tuple(positions for _, positions in pictures)
    return Drawing(exercise, draft.graph, draft.goal, draft.figures, positions)


# ---------------------------------------------------------------- pictures

_INK = (20, 20, 20)
_TINY = 1e-6  # pixels: above rounding noise, which differs between machines and must not decide anything


def _picture(figure: Figure) -> tuple[Image.Image, dict[str, tuple[int, int]]]:
    """The figure, fitted into its picture, and its points' pixels."""
    width, height = figure.size
    unit = max(1, min(width, height) // 100)  # pixels of one step of a letter
    image = require("PIL.Image", "hf", "draw_exercises").new("RGB", figure.size, (255, 255, 255))
    pen = _Pen(require("PIL.ImageDraw", "hf", "draw_exercises").Draw(image), unit)
    points, scale = _fitted(figure, margin=15 * unit, below=11 * unit if figure.caption else 0)
    middle = sum(points.values(), 0j) / len(points)

    for ends in figure.lines:
        pen.path([points[name] for name in ends])
    for centre, radius in figure.circles.items():
        pen.path(_arc(points[centre], radius * scale, 0, 2 * math.pi))
    for name, position in points.items():
        if name.isupper():
            outward = figure.names.get(name, _direction(position - middle, -1j))
            pen.text(name, position + 7 * unit * outward)
    for ends, label in figure.lengths.items():
        start, end = (points[name] for name in ends)
        midpoint = (start + end) / 2
        across = _direction((end - start) * 1j, 1j)
        inside = (across * (midpoint - middle).conjugate()).real < -_TINY
        outward = -across if inside else across
        pen.text(label, midpoint + (4 * unit + pen.half_extent(label, outward)) * outward)
    for corners, label in figure.angles.items():
        start, vertex, end = (points[name] for name in corners)
        pen.angle(vertex, start - vertex, end - vertex, label)
    if figure.caption:
        pen.text(figure.caption, complex(width / 2, -(height - 6 * unit)))
    return image.convert(figure.mode), {name: _pixel(p) for name, p in points.items()}


def _fitted(figure: Figure, margin: int, below: int) -> tuple[dict[str, complex], float]:
    """Points in pixels (y upwards, so that the picture lies below the axis), and pixels of one unit."""
    radii = {name: figure.circles.get(name, 0.0) for name in figure.points}
    left = min(p.real - radii[n] for n, p in figure.points.items())
    right = max(p.real + radii[n] for n, p in figure.points.items())
    bottom = min(p.imag - radii[n] for n, p in figure.points.items())
    top = max(p.imag + radii[n] for n, p in figure.points.items())
    width, height = figure.size[0], figure.size[1] - below
    scale = min((width - 2 * margin) / (right - left), (height - 2 * margin) / (top - bottom))
    shift = complex(width / 2, -height / 2) - scale * complex(
        (left + right) / 2, (bottom + top) / 2
    )
    return {name: scale * p + shift for name, p in figure.points.items()}, scale


class _Pen:
    """Draws lines, arcs and letters, all of them as thick as the picture is large."""

    def __init__(self, draw: ImageDraw.ImageDraw, unit: int):
        self.draw = draw
        self.unit = unit
        self.thickness = (unit + 1) // 2

    def path(self, points: Sequence[complex]) -> None:
        """Straight lines from point to point. Thick ones are thin ones side by side."""
        pixels = [_pixel(p) for p in points]
        for dx in range(self.thickness):
            for dy in range(self.thickness):
                self.draw.line([(x + dx, y + dy) for x, y in pixels], fill=_INK)

    def text(self, text: str, centre: complex) -> None:
        x = centre.real - self.unit * (6 * len(text) - 2) / 2
        y = centre.imag + 3 * self.unit
        for letter in text:
            for stroke in _STROKES[letter].split():
                steps = [(int(at[0]), int(at[1])) for at in stroke.split("-")]
                self.path([complex(x + self.unit * i, y - self.unit * j) for i, j in steps])
            x += 6 * self.unit

    def angle(self, vertex: complex, one: complex, other: complex, label: str) -> None:
        """An arc between two sides, and its label on the bisector, as near as it fits between them."""
        turn = cmath.phase(other / one)
        bisector = _direction(one, 0) * cmath.rect(1, turn / 2)
        radius = 7 * self.unit
        self.path(_arc(vertex, radius, cmath.phase(one), turn))
        room = self.half_extent(label, bisector * 1j) / math.tan(abs(turn) / 2)
        reach = self.half_extent(label, bisector)
        self.text(label, vertex + bisector * (max(room, radius) + reach + 2 * self.unit))

    def half_extent(self, text: str, direction: complex) -> float:
        """How far a centred text reaches in a direction, in pixels."""
        return self.unit * (abs(direction.real) * (3 * len(text) - 1) + abs(direction.imag) * 3)


def _arc(centre: complex, radius: float, start: float, turn: float) -> list[complex]:
    steps = max(8, math.ceil(abs(turn) * radius / 4))
    return [centre + cmath.rect(radius, start + turn * i / steps) for i in range(steps + 1)]


def _direction(vector: complex, default: complex) -> complex:
    return vector / abs(vector) if abs(vector) > _TINY else default


def _pixel(point: complex) -> tuple[int, int]:
    return round(point.real - _TINY), round(-point.imag - _TINY)


# Letters as pen strokes: steps from 0 to 4 to the right and from 0 to 6 downwards, "02-46" a line between two places.
_STROKES = {
    " ": "",
    ".": "15-25-26-16-15",
    "°": "10-30-32-12-10",
    "0": "10-30-41-45-36-16-05-01-10",
    "1": "11-20-26 16-36",
    "2": "01-10-30-41-42-06-46",
    "3": "00-40-22-32-43-45-36-16-05",
    "4": "36-30-04-44",
    "5": "40-00-02-32-43-45-36-06",
    "6": "40-20-02-05-16-36-45-44-33-03",
    "7": "00-40-16",
    "8": "10-30-41-42-33-13-02-01-10 13-04-05-16-36-45-44-33",
    "9": "43-13-02-01-10-30-41-44-26-06",
    "A": "06-20-46 14-34",
    "B": "03-33-42-41-30-00-06-36-45-44-33",
    "C": "41-30-10-01-05-16-36-45",
    "D": "00-06-26-44-42-20-00",
    "E": "40-00-06-46 03-33",
    "F": "40-00-06 03-33",
    "G": "41-30-10-01-05-16-36-45-43-23",
    "I": "10-30 20-26 16-36",
    "M": "06-00-23-40-46",
    "N": "06-00-46-40",
    "O": "10-30-41-45-36-16-05-01-10",
    "P": "06-00-30-41-42-33-03",
    "Q": "10-30-41-45-36-16-05-01-10 24-46",
    "R": "06-00-30-41-42-33-03 23-46",
    "U": "00-05-16-36-45-40",
    "x": "02-46 42-06",
    "y": "02-24 42-06",
}
