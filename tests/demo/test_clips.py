"""The clips of `mmpack smoke --video`: what a decoder sees of them is what the question asks about."""

import numpy as np
import pytest

from mmpack.demo.clips import COLOURS, clip_exercises

av = pytest.importorskip("av")


def colours_seen(data):
    """Colours of the squares in order of time, by the pixel furthest from the background of each frame."""
    import io

    seen = []
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(video=0):
            pixels = frame.to_ndarray(format="rgb24").astype(int)
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_answer_is_what_the_frames_show(seed):
    for exercise in clip_exercises(6, seed):
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


def test_no_frame_alone_tells():
    """At no time is more than one square to be seen."""
    import io

    for exercise in clip_exercises(2):
        with av.open(io.BytesIO(exercise.video)) as container:
            for frame in container.decode(video=0):
                pixels = frame.to_ndarray(format="rgb24").astype(int)
                near = [
                    (np.abs(pixels - rgb).sum(axis=2) < 60).sum() > 100 for rgb in COLOURS.values()
                ]
                assert sum(near) <= 1
