"""Fixtures are what their script makes, and the drawn problems are right: answers measured off the pictures."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmpack.demo.datasets import load_exercises

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PICTURE = "problems/train/3/img_diagram.png"
RECORD = "problems/train/3/data.json"
sys.path.append(str(FIXTURES))

import geometry  # noqa: E402


def regenerate(*options: str) -> subprocess.CompletedProcess[str]:
    script = FIXTURES / "regenerate.py"
    return subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    assert regenerate("--out", str(folder)).returncode == 0
    return folder


def test_fixtures_are_fresh():
    done = regenerate("--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_check_accepts_other_bytes_of_the_same_content(made):
    picture, record = made / PICTURE, made / RECORD
    before = picture.read_bytes()
    Image.open(picture).save(picture, compress_level=0)
    record.write_text(json.dumps(json.loads(record.read_text())))
    assert picture.read_bytes() != before
    assert regenerate("--check", "--out", str(made)).returncode == 0


def one_pixel(picture: Path) -> None:
    image = Image.open(picture)
    image.putpixel((0, 0), (254, 255, 255))
    image.save(picture)


@pytest.mark.parametrize(
    ("path", "spoil", "part"),
    [
        (PICTURE, one_pixel, "stale"),
        (PICTURE, Path.unlink, "missing"),
        ("problems/train/99/data.json", lambda path: None, "made by no producer"),
    ],
)
def test_check_names_what_differs(made, path, spoil, part):
    file = made / path
    file.parent.mkdir(exist_ok=True)
    before = file.read_bytes() if file.exists() else None
    if before is None:
        file.write_text("{}")
    spoil(file)
    done = regenerate("--check", "--out", str(made))
    if before is None:
        file.unlink()
    else:
        file.write_bytes(before)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert path in done.stderr
    assert part in done.stderr


# ---------------------------------------------------------------- the drawn problems

DRAWINGS = geometry.drawings()


def at(positions, name):
    x, y = positions[name]
    return complex(x, -y)


def measured_angle(positions, corners):
    """Degrees between two sides, from pixels."""
    a, vertex, b = (at(positions, name) for name in corners)
    cosine = ((a - vertex) * (b - vertex).conjugate()).real / abs(a - vertex) / abs(b - vertex)
    return math.degrees(math.acos(cosine))


def labelled(label: str, answer: str) -> float:
    return float(answer if label[0] in "xy" else label.removesuffix("°"))


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda d: d.exercise.exercise_id)
def test_labels_and_answers_agree_with_the_picture(drawing):
    answer = drawing.exercise.answer
    checked = 0
    for figure, positions in zip(drawing.figures, drawing.positions, strict=True):
        for corners, label in figure.angles.items():
            wanted = labelled(label, answer)
            assert measured_angle(positions, corners) == pytest.approx(wanted, abs=1.5)
            checked += label[0] in "xy"
        scales = []  # pixels of one unit, from each length
        for ends, label in figure.lengths.items():
            a, b = (at(positions, name) for name in ends)
            scales.append(abs(a - b) / labelled(label, answer))
            checked += label[0] in "xy"
        for one, other in pairwise(scales):
            assert one == pytest.approx(other, rel=0.02)
    assert checked == 1 or drawing.exercise.exercise_id in UNLABELLED


def chord(p):
    return 13 * abs(at(p[0], "A") - at(p[0], "B")) / abs(at(p[0], "O") - at(p[0], "A"))


def diagonal(p):
    return 15 * abs(at(p[0], "A") - at(p[0], "C")) / abs(at(p[0], "A") - at(p[0], "B"))


UNLABELLED = {  # problems whose unknown has no label in the picture
    "7": chord,
    "9": lambda p: 8 + 8 - 5 - 5,
    "13": lambda p: 2 * 3.14159265 * 6,
    "15": diagonal,
}


@pytest.mark.parametrize("exercise_id", UNLABELLED)
def test_answers_that_no_label_stands_for(exercise_id):
    drawing = DRAWINGS[int(exercise_id) - 1]
    wanted = UNLABELLED[exercise_id](drawing.positions)
    assert float(drawing.exercise.answer) == pytest.approx(wanted, rel=0.01)


def test_the_set_is_as_promised():
    exercises = geometry.draw_exercises()
    sizes = {image.size for exercise in exercises for image in exercise.images}
    assert len(exercises) >= 12
    assert {(120, 90), (1200, 700)} <= sizes
    assert min(w for w, _ in sizes) == 120
    assert max(w * h for w, h in sizes) == 1200 * 700
    assert sum(len(exercise.images) > 1 for exercise in exercises) >= 2
    assert {drawing.graph for drawing in DRAWINGS} >= {"Triangle", "Circle", "Line"}
    assert len({exercise.exercise_id for exercise in exercises}) == len(exercises)
    for exercise in exercises:
        assert len(set(exercise.choices)) == 4
        assert exercise.choices["ABCD".index(exercise.answer_letter)] == exercise.answer
        assert list(exercise.choices) == sorted(exercise.choices, key=float)


def test_files_hold_the_drawn_problems():
    drawn, read = geometry.draw_exercises(), load_exercises()
    for one, other in zip(drawn, read, strict=True):
        for name in ("exercise_id", "prompt", "answer", "choices", "answer_letter"):
            assert getattr(one, name) == getattr(other, name)
        for picture, file in zip(one.images, other.images, strict=True):
            assert picture.mode == file.mode
            assert np.array_equal(np.asarray(picture), np.asarray(file))
