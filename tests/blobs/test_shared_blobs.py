"""Blobs in shared memory: nothing is left of them when their processes have ended, however they ended."""

import os
import pickle
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.blobs import key, pixels, process, ready

from mmpack.blobs import SharedBlobs, janitor
from mmpack.blobs.blob import HEAD_BYTES
from mmpack.errors import ArgumentError, BlobError

MAKER = """
import sys
from support.blobs import key, pixels
from mmpack.blobs import SharedBlobs

store = SharedBlobs(10**6, root={code!r})
store.put(key(0), pixels(0))
print(store.folder, flush=True)
sys.stdin.buffer.read()
"""


def gone(path: Path, seconds: float = 20.0) -> bool:
    """Whether it goes; a janitor needs a moment."""
    end = time.monotonic() + seconds
    while path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not path.exists()


def janitors(folder: Path) -> list[int]:
    """Processes that wait for a folder's end."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and any(w.endswith(b"janitor.py") for w in words):
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def root(tmp_path):
    """Not the node's own shared memory: other tests' stores are there."""
    yield tmp_path
    # a janitor may be at work still
    assert all(gone(path) for path in tmp_path.glob("mmpack-*"))


def test_the_last_close_frees_it(root):
    store = SharedBlobs(10**6, root=root)
    other = pickle.loads(pickle.dumps(store))
    store.put(key(0), pixels(0))
    assert other.folder == store.folder and np.array_equal(other[key(0)], pixels(0))
    assert len(janitors(store.folder)) == 1
    store.close()
    store.close()
    assert np.array_equal(other[key(0)], pixels(0))
    late = pickle.dumps(other)
    other.close()
    assert not store.folder.exists()
    with pytest.raises(BlobError, match=r"went away with the last process.*MM404"):
        pickle.loads(late)
    end = time.monotonic() + 20
    while janitors(store.folder) and time.monotonic() < end:
        time.sleep(0.02)
    assert not janitors(store.folder)


def test_a_killed_process_leaves_nothing(root):
    with process(str(root), program=MAKER) as maker:
        folder = Path(maker.stdout.readline().decode().strip())
        assert (folder / key(0)[:2] / key(0)).exists()
        os.kill(maker.pid, signal.SIGKILL)
        assert gone(folder)


def test_who_still_uses_it_keeps_it(root):
    with process(str(root), program=MAKER) as maker:
        folder = Path(maker.stdout.readline().decode().strip())
        store = SharedBlobs(10**6, folder.name.removeprefix(f"mmpack-{os.getuid()}-"), root=root)
        with process("store[key(0)]", pickle.dumps(store)) as reader:
            ready(reader)
            store.close()
            maker.kill()
            maker.wait()
            time.sleep(0.2)
            assert folder.exists()
            reader.kill()
            reader.wait()
            assert gone(folder)


def test_when_the_janitor_is_killed_too_the_next_store_cleans_up(root):
    with process(str(root), program=MAKER) as maker:
        folder = Path(maker.stdout.readline().decode().strip())
        [janitor] = janitors(folder)
        os.kill(janitor, signal.SIGKILL)
        maker.kill()
        maker.wait()
    half = folder.with_name(folder.name + "x.gone")
    half.mkdir(0o700)  # as a janitor leaves it that is killed over its work
    time.sleep(0.1)
    assert folder.exists()
    with SharedBlobs(10**6, root=root):
        assert not folder.exists() and not half.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_bytes": 2**60}, "has room for"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"max_bytes": 10, "name": "../x"}, "name is '../x'"),
        ({"max_bytes": 10, "root": "/nowhere/at/all"}, "can't be used (No such file"),
    ],
)
def test_refused_options(options, says):
    with pytest.raises(ArgumentError) as caught:
        SharedBlobs(**options)
    assert says in str(caught.value) and "Fix: " in str(caught.value)


CHAOS = """
import random
from mmpack.errors import BlobError

draw, held = random.Random({seed}), []
print("ready", flush=True)
while True:
    i = draw.randrange(40)
    try:
        if draw.random() < 0.5:
            store.put(key(i), pixels(i))
            held.append(i)
        else:
            with store.hold([key(i)]):
                assert (store[key(i)] == pixels(i)).all()
    except BlobError as error:
        assert error.code in ("MM503", "MM404"), error
    while held and draw.random() < 0.6:
        store.release([key(held.pop())])
    if draw.random() < 0.05:
        store.remove([key(draw.randrange(40))])
"""


def test_processes_that_are_killed_at_any_moment(root):
    """Six of them, three at a time: what is there is whole, within the budget, and free when they are gone."""
    draw = random.Random(3)
    room = 12 * (HEAD_BYTES + pixels(0).nbytes)
    with SharedBlobs(room, root=root) as store:
        given = pickle.dumps(store)
        for round_ in range(2):
            started = [process(CHAOS.format(seed=4 * round_ + k), given) for k in range(3)]
            running = [context.__enter__() for context in started]
            try:
                for worker in running:
                    ready(worker)
                end = time.monotonic() + 0.3 + draw.random()
                while time.monotonic() < end:
                    for k in list(store):
                        found = store.get(k)
                        number = next(i for i in range(40) if key(i) == k)
                        assert found is None or np.array_equal(found, pixels(number))
                    assert all(worker.poll() is None for worker in running)
            finally:
                for context in started:
                    context.__exit__(None, None, None)
            sizes = [p.stat().st_size for p in store.folder.glob("[0-9a-f][0-9a-f]/*")]
            assert sizes and sum(sizes) <= room
            assert store.remove(list(store)) > 0 and len(store) == 0  # nobody holds anything
        for i in range(12):  # the count of a killed process takes no room for good
            store.put(key(100 + i), pixels(i))
        assert len(store) == 12


# ---------------------------------------------------------------- other accounts of the node

NOBODY = 65534


def as_another(root: Path, name: str) -> Path:
    """The folder of a store as another account makes it."""
    if os.getuid():
        pytest.skip("only root can give a folder to another account")
    folder = root / f"mmpack-{os.getuid()}-{name}"
    folder.mkdir(0o777)
    os.chmod(folder, 0o777)
    (folder / janitor.USERS).touch()
    for path in (folder, folder / janitor.USERS):
        os.chown(path, NOBODY, NOBODY)
    return folder


def open_to_all(root: Path, name: str) -> Path:
    folder = root / f"mmpack-{os.getuid()}-{name}"
    folder.mkdir()
    os.chmod(folder, 0o755)
    return folder


@pytest.mark.parametrize("made", [as_another, open_to_all])
def test_a_folder_that_another_account_may_have_made_is_refused(tmp_path, made):
    folder = made(tmp_path, "run")
    with pytest.raises(ArgumentError, match=r"mmpack-\d+-run is not a folder of this user alone"):
        SharedBlobs(10**5, "run", root=tmp_path)
    store = SharedBlobs(10**5, root=tmp_path)
    late = pickle.dumps(store)
    store.close()
    os.rename(folder, store.folder)
    with pytest.raises(ArgumentError, match="is not a folder of this user alone"):
        pickle.loads(late)
