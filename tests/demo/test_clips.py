"""The clips of `mmpack smoke --video`: what a decoder sees of them is what the question asks about."""

import io

import numpy as np
import pytest

from mmpack.demo.clips import COLOURS, clip_exercises

av = pytest.importorskip("av")


def colours_seen(data):
    """Colours of the squares in order of time, by the pixel furthest from the background of each frame."""
    seen = []
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(video=0):
            pixels = frame.to_ndarray(format="rgb24").astype(int)
            near = [(np.abs(pixels - rgb).sum(2) < 60).sum() > 100 for rgb in COLOURS.values()]
            assert sum(near) <= 1  # no frame alone tells the order
            off = np.abs(pixels - 245).sum(axis=2)
            if (off > 150).sum() < 200:
                seen.append(None)
                continue
            mean = np.median(pixels[off > 150], axis=0)
            distance = {name: np.abs(mean - rgb).sum() for name, rgb in COLOURS.items()}
            seen.append(min(distance, key=distance.get))
    return [c for c, before in zip(seen, [None, *seen], strict=False) if c not in (None, before)]


def answer_of(prompt, order):
    tokens = prompt.rstrip("?").split()
    if "right" in tokens:
        step = -1 if "before" in tokens else 1
        return order[order.index(tokens[-1]) + step]
    return order[{"first": 0, "second": 1, "third": 2, "last": 3}[tokens[-1]]]


def test_the_answer_is_what_the_frames_show():
    for exercise in clip_exercises(6):
        order = colours_seen(exercise.video)
        assert sorted(order) == sorted(exercise.choices) and len(set(order)) == 4
        assert exercise.answer == answer_of(exercise.prompt, order)
        assert exercise.choices["ABCD".index(exercise.answer_letter)] == exercise.answer
        assert exercise.images == ()


def test_seeds_decide_everything():
    one, again, other = clip_exercises(3), clip_exercises(3), clip_exercises(3, seed=1)
    assert [p.video for p in one] == [p.video for p in again] != [p.video for p in other]
    assert [p.exercise_id for p in one] == ["clip-1", "clip-2", "clip-3"]
    assert len({p.prompt for p in clip_exercises(12)}) > 4  # not one question asked over and over
