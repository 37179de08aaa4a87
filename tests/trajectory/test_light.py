"""Trajectories are made in data-loader workers: neither torch nor transformers is loaded."""

from support.process import run_python

CODE = """
import sys
import mmpack as mp
t = mp.trajectory
for name in t.__all__:
    getattr(t, name)
turns = [t.Turn([1, 2], [3]), t.Turn([1, 2, 3, 4], [5])]
(sample,) = t.to_samples(t.Trajectory("e", "g", "qwen2_5_vl", turns))
assert mp.validate(sample) == [] and len(t.from_samples([sample])[0]) == 2
assert t.truncate(sample, 3).tokens == 2 and t.window(sample, 0).dropped == []
assert len(t.trajectory_groups([sample])) == 1
print([n for n in ("torch", "transformers") if n in sys.modules])
"""


def test_the_room_is_numpy_only():
    result = run_python(CODE)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
