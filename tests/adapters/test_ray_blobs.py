"""Pixels in Ray's object store, with Ray as it is, on one node: packs are the same bits, and nothing stays behind."""

import os
import signal
import time
import warnings
import zlib

import numpy as np
import pytest
import torch

pytest.importorskip("ray")
import ray
from support.batch_tensors import assert_same
from support.blobs import key, pixels
from support.models import with_pixels
from support.samples import make_sample
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.adapters.ray_blobs import RayBlobs, _holder
from mmpack.blobs import BlobFolder, take
from mmpack.errors import BackendError, BlobError, UnwrittenWarning

pytestmark = [pytest.mark.plane, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
SIZE = pixels(0).nbytes
LARGE = 2**20  # bytes, of media that can be told from what else is in Ray's store


@pytest.fixture
def store(ray_cluster):
    with RayBlobs(10 * SIZE) as made:
        yield made


@ray.remote(num_cpus=0, max_restarts=0)
class Other:
    """Another process with the store."""

    def __init__(self, store):
        self.store = store

    def pid(self):
        return os.getpid()

    def do(self, method, *args):
        return getattr(self.store, method)(*args)

    def batch(self, samples):
        batch = mp.pack(samples, media=self.store)
        return batch.pixel_values, self.store.stats.read


def do(other, *args):
    return ray.get(other.do.remote(*args))


def within(seconds, holds):
    """Whether `holds()` becomes true."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_packs_in_another_process_are_the_same_bits(dtype):
    parts = [("text", [1, 2]), ("image", (1, 4, 4), "p0"), ("response", [5, 6])]
    other = [("image", (1, 4, 4), "p1"), ("response", [7])]
    samples = with_pixels([make_sample(p, f"s{k}") for k, p in enumerate((parts, parts, other))])
    for sample in samples:
        for medium in sample.media:
            medium.pixel_values = torch.as_tensor(200 * medium.pixel_values).to(dtype)
    with RayBlobs(2**20) as store:
        lean = take(samples, store)
        assert (store.stats.written, store.stats.known, len(store)) == (2, 1, 2)
        assert all(m.pixel_values is None for s in lean for m in s.media)
        assert_same(mp.pack(lean, media=store), mp.pack(samples))
        there, read = ray.get(Other.remote(store).batch.remote(lean))
        wanted = mp.pack(samples).pixel_values
        assert torch.equal(there, wanted) and there.dtype == dtype and read == 2


def test_the_code_of_the_page_runs(capsys):
    page = "docs/media_by_reference.md"
    [code] = [block for block in blocks(page) if "import ray" in block[1]]
    parts = [("image", (1, 4, 4), "p"), ("response", [5, 6])]
    run(page, {"mp": mp, "take": take, "samples": with_pixels([make_sample(parts)])}, [code])
    assert "torch.Size([16, 1176])" in capsys.readouterr().out


def test_reading_copies_nothing_and_nobody_writes(store):
    assert store.put(key(1), pixels(1)) and not store.put(key(1), pixels(1))
    first, again = store[key(1)], store[key(1)]
    assert np.array_equal(first, pixels(1)) and first.ctypes.data == again.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0
    store.release()
    assert store.remove([key(1)]) == 1 and key(1) not in store and store.get(key(1)) is None
    assert np.array_equal(first, pixels(1))


def test_who_needs_room_takes_what_nobody_holds_the_oldest_first(store):
    for i in range(10):
        store.put(key(i), pixels(i))
    with pytest.raises(BlobError, match=f"{10 * SIZE} of {10 * SIZE} are in use.*MM503"):
        store.put(key(10), pixels(10))
    store.release([key(i) for i in range(3)])
    assert np.array_equal(store[key(0)], pixels(0))  # used, so key(1) is the oldest
    assert store.put(key(10), pixels(10))
    assert set(store) == {key(i) for i in range(11)} - {key(1)}
    with store.hold([key(0)]):
        store.put(key(11), pixels(11))
        assert key(0) in store and key(2) not in store
        with pytest.raises(BlobError, match="MM503"):
            store.put(key(12), pixels(12))
    with pytest.raises(BlobError, match=r"is not in the store.*MM404"):
        store.keep([key(0), key(1)])
    store.put(key(12), pixels(12))  # nothing of the failed hold stayed
    assert key(0) not in store


def test_each_hold_is_given_back_once(store):
    other = Other.remote(store)
    for _ in range(2):
        store.put(key(1), pixels(1))
    store.release([key(1)])
    assert store.remove([key(1)]) == 0
    do(other, "keep", [key(1)])
    store.release([key(1)])
    store.release([key(1)])  # it had none, and takes none of the other's
    assert store.remove([key(1)]) == 0
    do(other, "release")
    assert store.remove([key(1)]) == 1


def test_holds_of_a_killed_process_end_with_it(store):
    other = Other.remote(store)
    for i in range(10):
        do(other, "put", key(i), pixels(i))
    with pytest.raises(BlobError, match="MM503"):
        store.put(key(10), pixels(10))
    os.kill(ray.get(other.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(other.pid.remote())
    assert np.array_equal(store[key(3)], pixels(3))  # what it made is not lost

    def fits():
        try:
            store.put(key(10), pixels(10))
        except BlobError:
            return False
        return True

    assert within(30, fits)


def put_damaged(store, i):
    """As if a bit of it changed on its way; it is held, as by `put`."""
    body = pixels(i).reshape(-1).view(np.uint8)
    right = zlib.crc32(body, zlib.crc32(key(i).encode()))
    body = body.copy()
    body[100] ^= 1
    wrote, _ = store._ask("put", key(i), "float32", (4, 64), right, body, _holder())
    assert wrote


def test_damaged_pixels_are_named_and_can_be_put_again(store):
    put_damaged(store, 1)
    other = Other.remote(store)
    with pytest.raises(BlobError, match="is damaged: not as it was put") as caught:
        store[key(1)]
    assert caught.value.code == "MM502" and store.stats.read == 0
    assert key(1) not in store and list(store) == [] and store.get(key(1)) is None
    with pytest.raises(BlobError, match="is not in the store"):
        store.keep([key(1)])
    assert do(other, "put", key(1), pixels(1)) and np.array_equal(store[key(1)], pixels(1))
    do(other, "release")
    assert store.remove([key(1)]) == 0  # held by the one that put it first, all along
    store._ask("release", {key(1): 1}, _holder().name)
    for i in range(2, 12):  # what was damaged takes no room
        store.put(key(i), pixels(i))


def test_a_source_is_asked_for_what_is_not_here_or_damaged(tmp_path):
    far = BlobFolder(tmp_path)
    for i in range(4):
        far.put(key(i), pixels(i))
    with RayBlobs(3 * SIZE, source=far) as near:
        assert key(1) in near and key(9) not in near and len(near) == 0
        assert near.get(key(9)) is None
        assert np.array_equal(near[key(1)], pixels(1)) and near.stats.fetched == 1
        other = Other.remote(near)
        assert np.array_equal(do(other, "get", key(1)), pixels(1)) and set(near) == {key(1)}
        assert np.array_equal(do(other, "get", key(2)), pixels(2)) and set(near) == {key(1), key(2)}
        assert near.remove([key(1), key(2)]) == 2  # fetching holds nothing
        put_damaged(near, 3)
        assert np.array_equal(near[key(3)], pixels(3)) and near.stats.fetched == 2
        near.keep([key(3)])
        for i in (5, 6):
            near.put(key(i), pixels(i))
        with pytest.warns(UnwrittenWarning, match="until then each read fetches for itself"):
            assert np.array_equal(near[key(0)], pixels(0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(near[key(1)], pixels(1))
        assert near.stats.unwritten == 2 and key(0) not in set(near)


def used():
    """Bytes of Ray's store that are in use."""
    total = ray.cluster_resources()["object_store_memory"]
    return total - ray.available_resources().get("object_store_memory", 0)


@ray.remote(num_cpus=0, max_restarts=0)
class Maker:
    """Ray's workers don't import tests, so they are handed the keys."""

    def __init__(self, keys):
        self.store = RayBlobs(20 * LARGE)
        for i, name in enumerate(keys):
            self.store.put(name, np.full((1, LARGE), i, np.uint8))

    def handed(self):
        return os.getpid(), self.store


def test_nothing_stays_when_its_maker_is_killed_or_all_have_closed_it():
    assert within(30, lambda: used() < 2 * LARGE)
    maker = Maker.remote([key(i) for i in range(16)])
    pid, store = ray.get(maker.handed.remote())
    assert len(store) == 16 and within(30, lambda: used() > 15 * LARGE)
    held = store[key(5)]
    os.kill(pid, signal.SIGKILL)

    def ended():
        try:
            return len(store) < 0
        except BlobError as error:
            return error.code == "MM404"

    assert within(60, ended)
    with pytest.raises(BlobError, match="keep the process that made it"):
        store.put(key(20), pixels(1))
    assert (held == 5).all()
    del held
    store.close()
    assert within(60, lambda: used() < 2 * LARGE)
    with RayBlobs(20 * LARGE) as store:
        for i in range(16):
            store.put(key(i), np.full((1, LARGE), i, np.uint8))
        assert within(30, lambda: used() > 15 * LARGE)
    with pytest.raises(BlobError, match="the store was closed"):
        store.get(key(0))
    assert within(60, lambda: used() < 2 * LARGE)


def test_what_is_refused(store, monkeypatch):
    store.put(key(1), pixels(1))
    for call, said in (
        (lambda: store.put("a", pixels(1)), "'a' is not a cache key"),
        (lambda: store.put(key(1), pixels(1)[0]), r"float32 \[64\]"),
        (
            lambda: store.put(key(1), pixels(1).astype(np.uint8)),
            "float32 .* in the store, but uint8",
        ),
        (lambda: RayBlobs(2**40), "this node's object store has"),
        (lambda: RayBlobs(0), "max_bytes"),
        (lambda: RayBlobs(1, source=[]), "source is list"),
    ):
        with pytest.raises(mp.ArgumentError, match=said):
            call()
    store.release()
    assert store.remove([key(1)]) == 1  # what was refused holds nothing
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(BackendError, match="Ray is not started"):
        RayBlobs(1)
