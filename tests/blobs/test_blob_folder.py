"""A folder of blobs: what was put is what is read, and what goes for want of room is what nobody holds."""

import gc
import json
import os
import pickle
import random
import resource
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.blobs import ENVIRONMENT, key, pixels, process, ready

from mmpack.blobs import BlobFolder
from mmpack.blobs.blob import HEAD_BYTES, checksum
from mmpack.errors import ArgumentError, BlobError

SIZE = HEAD_BYTES + pixels(0).nbytes


@pytest.fixture
def store(tmp_path):
    with BlobFolder(tmp_path / "blobs") as made:
        yield made


@settings(max_examples=30)
@given(
    values=arrays.arrays(
        st.sampled_from(["u1", "f2", "f4", "f8"]), st.tuples(*[st.integers(0, 9)] * 2)
    )
)
def test_what_is_read_is_what_was_put(tmp_path_factory, values):
    with BlobFolder(tmp_path_factory.mktemp("blobs")) as store:
        assert store.put(key(0), values) and not store.put(key(0), values)
        read = store[key(0)]
        assert read.dtype == values.dtype and read.shape == values.shape
        assert read.tobytes() == values.tobytes()
        assert (list(store), len(store), key(0) in store) == ([key(0)], 1, True)


def private() -> int:
    """KB of this process that no other shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("Private_Dirty", "Anonymous")))


def test_reading_copies_nothing_and_writing_changes_no_one_elses(store):
    rows = 2**15  # 8 MB
    store.put(key(0), pixels(0, rows))
    total = float(store[key(0)].sum(dtype=float))
    gc.collect()
    before = private()
    mine, other = torch.from_numpy(store[key(0)]), store[key(0)]
    assert float(other.sum(dtype=float)) == total
    assert private() - before < 1024  # KB, of 16 MB that are mapped
    mine[:] = 0
    assert private() - before > 8000
    assert float(other.sum(dtype=float)) == total == float(store[key(0)].sum(dtype=float))


def test_an_array_outlives_its_file_and_store(tmp_path):
    with BlobFolder(tmp_path) as store:
        store.put(key(0), pixels(0))
        read = store[key(0)]
        store.release()
        assert store.remove([key(0), key(1)]) == 1 and len(store) == 0
    assert np.array_equal(read, pixels(0))


def test_more_arrays_than_open_files(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for i in range(30):
        store.put(key(i), pixels(i))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        read = [store[key(i)] for i in range(30)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(np.array_equal(x, pixels(i)) for i, x in enumerate(read))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "no head"])
def test_damage_is_found_and_mended(store, damage):
    store.put(key(0), pixels(0))
    store.put(key(1), pixels(1))
    path = store.folder / key(0)[:2] / key(0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    other = (store.folder / key(1)[:2] / key(1)).read_bytes()
    cut = bytes(data[:-1])
    path.write_bytes(
        {"flip": bytes(data), "cut": cut, "empty": b"", "other": other, "no head": b"x" * 900}[
            damage
        ]
    )
    with pytest.raises(BlobError, match=r"is damaged.*\(MM502\). Fix: ") as caught:
        store[key(0)]
    assert caught.value.code == "MM502" and "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert key(0) not in store and store.put(key(0), pixels(0))
    assert np.array_equal(store[key(0)], pixels(0))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("(,)f4", [6, 6]),
        ("f4, (", [6, 6]),
        ("float32", [6.0, 6]),
        ("float32", [-6, -6]),
        ("float32", [36]),
        ("float32", [10**80, 10**80]),
        (["float32"], [6, 6]),
        ("uint8", [True, 144]),
    ],
)
def test_a_head_that_lies_is_damage(store, dtype, shape):
    body = np.zeros(144, np.uint8)
    fields = {"blob": 1, "dtype": dtype, "shape": shape, "crc32": checksum(key(0), body)}
    path = store.folder / key(0)[:2] / key(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps(fields).encode().ljust(255) + b"\n" + body.tobytes())
    with pytest.raises(BlobError, match=r"is damaged.*\(MM502\)"):
        store[key(0)]
    assert key(0) not in store


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda s: s.put("../../x", pixels(0)), "is not a cache key"),
        (lambda s: s.put(key(0).upper(), pixels(0)), "is not a cache key"),
        (lambda s: s[3], "is not a cache key"),
        (lambda s: s.put(key(0), np.zeros(4, np.float32)), "float32 [4]"),
        (lambda s: s.put(key(0), np.zeros((4, 4), np.int64)), "int64 [4, 4]"),
        (lambda s: s.put(key(9), np.zeros((4, 4), np.uint8)), "is float32 [4, 64] in the store"),
        (lambda s: BlobFolder(5), "folder is 5"),
        (lambda s: BlobFolder(s.folder, max_bytes=0), "max_bytes is 0"),
        (lambda s: BlobFolder(s.folder, source=[1]), "source is list"),
        (lambda s: BlobFolder(s.folder / "locks"), "can't write to"),
    ],
)
def test_refused(store, wrong, says):
    store.put(key(9), pixels(9))
    with pytest.raises(ArgumentError) as caught:
        wrong(store)
    assert says in str(caught.value) and "Fix: " in str(caught.value)


# ---------------------------------------------------------------- room


def test_the_least_recently_used_goes_first(tmp_path):
    """Against a dictionary in the order of use."""
    draw = random.Random(0)
    with BlobFolder(tmp_path, max_bytes=6 * SIZE) as store:
        model: OrderedDict[int, None] = OrderedDict()
        for step in range(200):
            i = draw.randrange(12)
            if draw.random() < 0.5 and i in model:
                assert np.array_equal(store[key(i)], pixels(i))
            else:
                assert store.put(key(i), pixels(i)) is (i not in model)
                store.release()
                if i in model:
                    continue  # a put of what is there is no use of it
            model[i] = None
            model.move_to_end(i)
            path = store.folder / key(i)[:2] / key(i)
            os.utime(path, ns=(step, step))
            while len(model) > 6:
                model.popitem(last=False)
            assert {key(i) for i in model} == set(store), step


def test_what_is_held_stays_and_is_told_when_nothing_else_can_go(tmp_path):
    with BlobFolder(tmp_path, max_bytes=2 * SIZE) as store:
        store.put(key(0), pixels(0))
        store.put(key(1), pixels(1))
        with pytest.raises(BlobError, match=r"all held by a process \(MM503\)"):
            store.put(key(2), pixels(2))
        store.release([key(1)])
        with store.hold([key(1)]), pytest.raises(BlobError, match="MM503"):
            store.put(key(2), pixels(2))
        assert store.remove([key(0)]) == 0
        store.put(key(2), pixels(2))
        assert set(store) == {key(0), key(2)}
        with pytest.raises(BlobError, match=r"is not in .* \(MM404\)"), store.hold([key(1)]):
            pass
        with pytest.raises(BlobError, match="don't fit"):
            store.put(key(3), pixels(3, rows=99))
        assert set(store) == {key(0), key(2)}


@pytest.mark.parametrize("end", ["release", "kill"])
def test_another_process_holds_until_it_lets_go_or_dies(tmp_path, end):
    with (
        BlobFolder(tmp_path, max_bytes=SIZE) as store,
        process("store.put(key(0), pixels(0))", pickle.dumps(store)) as holder,
    ):
        ready(holder)
        with pytest.raises(BlobError, match="MM503"):
            store.put(key(1), pixels(1))
        if end == "kill":
            holder.kill()
        else:
            holder.stdin.close()
        holder.wait()
        assert np.array_equal(store[key(0)], pixels(0))
        store.put(key(1), pixels(1))
        assert set(store) == {key(1)}


# the limit of a file's size stands for a full disk, which needs no rights to be made
FULL = """
import resource, signal, sys
from support.blobs import key, pixels
from mmpack.blobs import BlobFolder
from mmpack.errors import BlobError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = BlobFolder(sys.argv[1], max_bytes=10**6)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    store.put(key(0), pixels(0))
except BlobError as error:
    print(error.code, len(store), int((store.folder / "used").read_text()))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(store.put(key(0), pixels(0)), len(store))
print(sorted(p.name for p in store.folder.rglob("*.tmp")))
"""


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["MM503 0 0", "True 1", "[]"], done.stderr


def test_a_writer_that_was_killed_takes_no_room(tmp_path):
    code = "import mmpack.files as files\n"
    code += (
        "files._Guarded.write = lambda *_: (print('ready', flush=True), sys.stdin.buffer.read())\n"
    )
    code += "store.put(key(0), pixels(0))"
    with BlobFolder(tmp_path, max_bytes=2 * SIZE) as store:
        with process(code, pickle.dumps(store)) as writer:
            ready(writer)
            store.put(key(1), pixels(1))
            with pytest.raises(BlobError, match="MM503"):
                store.put(key(2), pixels(2))
            writer.kill()
            writer.wait()
        assert len(list(store.folder.rglob("*.tmp"))) == 1
        store.put(key(2), pixels(2))
        assert set(store) == {key(1), key(2)} and not list(store.folder.rglob("*.tmp"))


# ---------------------------------------------------------------- a source


class Counting(dict):
    def __init__(self, *given):
        super().__init__(*given)
        self.asked = []

    def get(self, key, default=None):
        self.asked.append(key)
        return super().get(key, default)


def test_a_source_is_asked_once(tmp_path):
    far = Counting({key(i): pixels(i) for i in range(3)})
    with BlobFolder(tmp_path, source=far) as store:
        assert key(0) in store and len(store) == 0
        for _ in range(2):
            assert np.array_equal(store[key(0)], pixels(0))
        assert far.asked == [key(0)] and set(store) == {key(0)} and store.stats.fetched == 1
        assert store.get(key(5)) is None
        path = store.folder / key(0)[:2] / key(0)
        path.write_bytes(b"damaged")
        assert np.array_equal(store[key(0)], pixels(0)) and store.stats.fetched == 2
        assert store.remove([key(0)]) == 1  # reading holds nothing
