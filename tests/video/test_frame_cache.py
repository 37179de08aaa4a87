"""The cache of decoded frames: the same pixels, one decode for several processes, bounded, and never a broken file."""

import multiprocessing
import os
import time

import numpy as np
import pytest
from support.marked_clips import clip, numbers_of

from mmpack.errors import ArgumentError, VideoError
from mmpack.video import FrameCache, decode
from mmpack.video.backends import pyav

SIZE = 3 * 96 * 128 + 256  # of a file with one frame


@pytest.fixture
def decodes(monkeypatch):
    """Counts decoder runs."""
    counted, real = [], pyav.decode

    def counting(*args):
        counted.append(args[3].tolist())
        return real(*args)

    monkeypatch.setattr(pyav, "decode", counting)
    return counted


def test_hits(tmp_path, decodes):
    cache = FrameCache(tmp_path, 10**7)
    first = decode(clip(), [3, 9, 9], cache=cache)
    again = decode(clip(), [3, 9, 9], cache=FrameCache(tmp_path, 10**7))
    np.testing.assert_array_equal(first, again)
    assert numbers_of(again) == [3, 9, 9] and len(decodes) == 1
    again[:] = 0  # the caller's own copy
    np.testing.assert_array_equal(decode(clip(), [3, 9, 9], cache=cache), first)
    assert (cache.stats.hits, cache.stats.misses) == (1, 1)


def test_other_frames_or_another_video_are_other_entries(tmp_path, decodes):
    cache = FrameCache(tmp_path, 10**7)
    for data, frames in [(clip(), [3, 9]), (clip(), [9, 3]), (clip(), [3]), (clip(gop=5), [3, 9])]:
        assert numbers_of(decode(data, frames, cache=cache)) == frames
    assert len(decodes) == 4 and cache.stats.hits == 0


@pytest.mark.parametrize("harm", ["cut", "longer", "flipped", "empty", "other key"])
def test_a_broken_file_is_decoded_anew_and_counted(tmp_path, decodes, harm):
    cache = FrameCache(tmp_path, 10**7)
    want = decode(clip(), [4], cache=cache)
    (path,) = tmp_path.glob("*.frames")
    data = bytearray(path.read_bytes())
    if harm == "other key":
        decode(clip(), [5], cache=cache)
        data = next(p for p in tmp_path.glob("*.frames") if p != path).read_bytes()
    elif harm == "flipped":
        data[-1] ^= 1
    else:
        data = {"cut": data[:-5], "longer": data + b"x", "empty": b""}[harm]
    path.write_bytes(data)
    np.testing.assert_array_equal(decode(clip(), [4], cache=cache), want)
    assert cache.stats.broken == 1
    np.testing.assert_array_equal(decode(clip(), [4], cache=cache), want)
    assert cache.stats.broken == 1 and cache.stats.hits == 1


def test_the_least_recently_used_go_first(tmp_path):
    cache = FrameCache(tmp_path, 3 * SIZE)
    for at, frame in enumerate([0, 1, 2, 0, 3]):
        decode(clip(), [frame], cache=cache)
        for age, path in enumerate(sorted(tmp_path.glob("*.frames"), key=os.path.getmtime)):
            os.utime(path, (1000 + 10 * at + age,) * 2)  # clocks of file systems are coarse
    assert (cache.stats.hits, cache.stats.evicted) == (1, 1)
    decode(clip(), [0], cache=cache)
    assert cache.stats.hits == 2
    decode(clip(), [1], cache=cache)  # the one that went
    assert cache.stats.misses == 5
    assert sum(p.stat().st_size for p in tmp_path.glob("*.frames")) <= 3 * SIZE


def test_leftovers_of_dead_processes_go(tmp_path):
    old, new = tmp_path / "a.part", tmp_path / "b.part"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    decode(clip(), [1], cache=FrameCache(tmp_path, 10**7))
    assert not old.exists() and new.exists()


def test_folders(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"can't write to .*Fix: "):
        FrameCache(tmp_path / "file" / "below", 1)
    for size in (0, "x", float("nan"), True):
        with pytest.raises(ArgumentError, match="max_bytes is "):
            FrameCache(tmp_path, size)
    with pytest.raises(ArgumentError, match="folder is None"):
        FrameCache(None, 1)
    cache = FrameCache(tmp_path / "small", SIZE)
    assert numbers_of(decode(clip(), [1, 2], cache=cache)) == [1, 2]  # larger than the cache
    with pytest.raises(VideoError):
        decode(b"no video at all", [0], cache=cache)
    assert not list((tmp_path / "small").glob("*.frames"))


def _work(folder, seed, decoded, results, start):
    cache = FrameCache(folder, 40 * SIZE)
    real = pyav.decode

    def counting(*args):
        decoded.put(tuple(args[3].tolist()))
        time.sleep(0.05)  # the others come while this one decodes
        return real(*args)

    pyav.decode = counting
    start.wait(60)
    wrong = 0
    for frame in np.random.default_rng(seed).permutation(20).tolist():
        wrong += numbers_of(decode(clip(), [frame], cache=cache)) != [frame]
    results.put((wrong, cache.stats.hits, cache.stats.misses, cache.stats.broken))


def test_several_processes_decode_each_clip_once(tmp_path):
    context = multiprocessing.get_context("fork")
    decoded, results, start = context.Queue(), context.Queue(), context.Barrier(4)
    clip()
    workers = [
        context.Process(target=_work, args=(tmp_path, seed, decoded, results, start))
        for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    counts = [results.get(timeout=120) for _ in workers]
    seen = [decoded.get(timeout=60) for _ in range(20)]
    for worker in workers:
        worker.join(60)
    assert len(set(seen)) == 20 and decoded.empty()
    assert sum(wrong for wrong, *_ in counts) == sum(broken for *_, broken in counts) == 0
    assert sum(misses for _, _, misses, _ in counts) == 20
    assert sum(hits for _, hits, _, _ in counts) == 60
    assert not list(tmp_path.glob("*.part"))


def test_a_small_cache_under_several_processes(tmp_path):
    """Evicting while others read: the frames are right all the same."""
    context = multiprocessing.get_context("fork")
    results, start = context.Queue(), context.Barrier(3)
    cramped = [
        context.Process(target=_cramped, args=(tmp_path, seed, results, start)) for seed in range(3)
    ]
    for worker in cramped:
        worker.start()
    assert [results.get(timeout=120) for _ in cramped] == [0, 0, 0]
    for worker in cramped:
        worker.join(60)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.frames")) <= 3 * SIZE


def _cramped(folder, seed, results, start):
    cache = FrameCache(folder, 3 * SIZE)
    start.wait(60)
    frames = np.random.default_rng(seed).integers(0, 6, 60).tolist()
    results.put(sum(numbers_of(decode(clip(), [f], cache=cache)) != [f] for f in frames))
