"""PrefixIndex against a plain dictionary; budgets, holds, threads and processes."""

import multiprocessing
import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.samples import make_sample

import mmpack as mp
from mmpack.cache import PrefixIndex
from mmpack.cache.keys import PrefixKeys
from mmpack.errors import ArgumentError

SIZE, PER_TOKEN = 2, 8
BLOCK = SIZE * PER_TOKEN


def keys_of(path, size=SIZE):
    """Keys of a made-up prefix: block k is named by path[:k + 1]."""
    blocks = tuple(repr(path[: k + 1]).encode() for k in range(len(path)))
    return PrefixKeys(blocks, size, len(path) * size)


def index_of(blocks):
    return PrefixIndex(blocks * BLOCK, bytes_per_token=PER_TOKEN, block_size=SIZE)


def put(index, path):
    with index.reserve(keys_of(path)) as new:
        return new


def cached(index, path):
    return index.lookup(keys_of(path)).tokens // SIZE


# -- what it finds -----------------------------------------------------------------------------------------------------


def test_ranges_of_a_shared_pack_lead_back_to_its_tokens():
    text = [("text", range(7)), ("image", (1, 4, 6), "x"), ("text", [1])]
    samples = [make_sample([*text, ("response", [9 + k] * 5)], f"s{k}") for k in range(3)]
    batch = mp.pack(samples, share_prefix=True)
    index = PrefixIndex(10**6, bytes_per_token=PER_TOKEN, block_size=4)
    for s, rows in zip(samples, batch.token_rows.split(batch.token_counts), strict=True):
        with index.reserve(index.keys(s, weights="w"), packed_rows=rows.numpy(), pack=0):
            pass
    for s in samples:
        hit = index.lookup(index.keys(s, weights="w"))
        ids = np.concatenate([batch.input_ids[a:b].numpy() for _, a, b in hit.packed])
        assert np.array_equal(ids, s.input_ids[: hit.tokens]) and hit.tokens == len(s) // 4 * 4
        assert len(hit.media) == 1 and hit.media[0].startswith(s.media[0].cache_key)
        assert index.lookup(index.keys(s, weights="w"), s.modality_spans[0].start).media == ()
        assert index.lookup(index.keys(s, weights="stale")).tokens == 0
        assert index.lookup(index.keys(s, weights="w", adapter="a")).tokens == 0


# -- budget ------------------------------------------------------------------------------------------------------------


def test_what_is_held_stays():
    index = index_of(3)
    put(index, "ab")
    with index.hold(keys_of("ab")) as hit:
        new = put(index, "xyz")
        assert (new.start, new.stop) == (0, 2) and index.stats.left_out == 2
        assert cached(index, "ab") == 2 and cached(index, "xyz") == 1
        again = put(index, "q")
        assert again.stop == 2 and cached(index, "x") == 0
        with pytest.raises(ArgumentError, match="clear: 1 prefixes are still held"):
            index.clear()
        assert hit.rows.tolist() == [0, 1, 2, 3]
    put(index, "xyz")
    assert cached(index, "xyz") == 3 and cached(index, "ab") == 0
    index.clear()
    assert len(index) == index.stats.bytes == 0 and put(index, "k").rows.tolist() == [0, 1]


# -- operations beside a dictionary -----------------------------------------------------------------------------

PATHS = st.text("abc", min_size=1, max_size=5)


class Machine(RuleBasedStateMachine):
    """The oracle: a list of prefixes in the order of their last use, and what is written in a store of rows."""

    def __init__(self):
        super().__init__()
        self.index = index_of(7)
        self.written = {}  # row -> content
        self.known = {}  # prefix -> (time of last use, first row)
        self.holds, self.time = [], 0

    def found(self, path):
        out = 0
        while out < len(path) and path[: out + 1] in self.known:
            out += 1
        return out

    def held(self):
        return {path[: k + 1] for _, path, count, _ in self.holds for k in range(count)}

    def touch(self, path, count):
        for k in range(count, 0, -1):
            self.time += 1
            if path[:k] not in self.held():
                self.known[path[:k]] = (self.time, self.known[path[:k]][1])

    def check(self, hit, path, count):
        assert hit.tokens == count * SIZE
        for k in range(count):
            first = self.known[path[: k + 1]][1]
            rows = hit.rows[k * SIZE : (k + 1) * SIZE].tolist()
            assert rows == [first, first + 1]
            assert [self.written[r] for r in rows] == [(path[: k + 1], 0), (path[: k + 1], 1)]

    @rule(path=PATHS, limit=st.none() | st.integers(0, 12))
    def look(self, path, limit):
        most = len(path) if limit is None else min(len(path), limit // SIZE)
        count = self.found(path[:most])
        self.check(self.index.lookup(keys_of(path), limit), path, count)
        self.touch(path, count)

    @rule(path=PATHS)
    def hold(self, path):
        if len(self.holds) < 3:
            stack = ExitStack()
            count = self.found(path)
            hit = stack.enter_context(self.index.hold(keys_of(path)))
            self.check(hit, path, count)
            self.holds.append((stack, path, count, hit))

    @rule(which=st.integers(0, 2))
    def let_go(self, which):
        if which < len(self.holds):
            stack, path, count, hit = self.holds.pop(which)
            self.check(hit, path, count)  # nobody has written over it
            stack.close()
            self.touch(path, count)

    @rule(path=PATHS, fails=st.booleans())
    def put(self, path, fails):
        start = self.found(path)
        own = {path[:k] for k in range(1, start + 1)}
        idle = [p for p in self.known if p not in self.held() | own]
        room = self.index.capacity - len(self.known) + len(idle)
        count = min(len(path) - start, room)
        leaving = max(0, count - (self.index.capacity - len(self.known)))
        for p in sorted(idle, key=lambda p: self.known[p])[:leaving]:
            assert not any(q.startswith(p) and q != p for q in self.known), "a root before its leaf"
            del self.known[p]
        try:
            with self.index.reserve(keys_of(path)) as new:
                assert (new.start, new.stop) == (start * SIZE, (start + count) * SIZE)
                taken = {row for _, first in self.known.values() for row in (first, first + 1)}
                assert not taken & set(new.rows.tolist())
                for i, row in enumerate(new.rows.tolist()):
                    self.written[row] = (path[: start + i // SIZE + 1], i % SIZE)
                if fails:
                    raise KeyError
        except KeyError:
            count = 0
        for k in range(count):
            self.known[path[: start + k + 1]] = (0, int(new.rows[k * SIZE]))
        self.touch(path, start + count)

    @rule()
    def forget(self):
        if not self.holds:
            self.index.clear()
            self.known.clear()

    @invariant()
    def same(self):
        assert len(self.index) == len(self.known) <= self.index.capacity
        assert self.index.stats.bytes == len(self.known) * BLOCK <= self.index.max_bytes
        assert len({first for _, first in self.known.values()}) == len(self.known)


def test_thousands_of_operations_beside_a_dictionary():
    some = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)
    run_state_machine_as_test(Machine, settings=some)


# -- threads and processes ---------------------------------------------------------------------------------------------


def test_threads_never_read_what_another_writes():
    """Rows say which prefix they were written for; a reader checks while it holds, writers push each other out."""
    index = index_of(24)
    rows = np.full((index.num_rows,), "", dtype=object)
    wrong, hits = [], [0] * 6

    def work(seed):
        rng = random.Random(seed)
        for _ in range(200):
            path = "".join(rng.choices("abcd", k=rng.randint(1, 5)))
            with index.hold(keys_of(path)) as hit:
                hits[seed] += hit.tokens
                for k in range(hit.tokens // SIZE):
                    if any(rows[r] != path[: k + 1] for r in hit.rows[k * SIZE : (k + 1) * SIZE]):
                        wrong.append(path)
            with index.reserve(keys_of(path)) as new:
                for i, r in enumerate(new.rows):
                    rows[r] = path[: new.start // SIZE + i // SIZE + 1]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and all(hits) and index.stats.evicted > 20
    assert len(index) <= index.capacity
    index.clear()  # nothing is held any more


def _in_child(index, pipe):
    before = len(index)
    put(index, "xy")
    pipe.send((before, index.capacity, cached(index, "ab"), cached(index, "xy")))


def test_a_fork_has_an_index_of_its_own():
    context = multiprocessing.get_context("fork")
    index = index_of(4)
    put(index, "ab")
    mine, theirs = context.Pipe()
    inside, done = threading.Event(), threading.Event()

    def busy():  # another thread is inside, and holds the lock, while the child begins
        with index._lock:
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=busy)
    with index.hold(keys_of("ab")) as hit:
        thread.start()
        inside.wait()
        child = context.Process(target=_in_child, args=(index, theirs))
        child.start()
        assert mine.poll(60), "the child waits for a lock that nobody holds there"
        assert mine.recv() == (0, 4, 0, 2)
        child.join()
        done.set()
        thread.join()
        assert hit.tokens == 4
    assert child.exitcode == 0 and cached(index, "ab") == 2 and cached(index, "xy") == 0


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda i: PrefixIndex(10, bytes_per_token=0), "bytes_per_token is 0"),
        (lambda i: PrefixIndex(15, bytes_per_token=1), "max_bytes is 15, but one block takes 16"),
        (lambda i: i.lookup([b"a"]), "keys is a list|keys is of type list"),
        (lambda i: i.lookup(keys_of("a", 3)), "blocks of 3 tokens, but the index has 2"),
        (lambda i: i.lookup(keys_of("a"), limit=1.5), "limit is 1.5"),
        (lambda i: i.reserve(keys_of("a"), packed_rows=[0.0, 1]).__enter__(), "dtype float64"),
        (lambda i: i.reserve(keys_of("ab"), packed_rows=[-1, 0]).__enter__(), "rows below 0"),
        (lambda i: i.features_of(i.lookup(keys_of("a")), None), "no feature store"),
        (lambda i: i.features_of(3, None), "hit is of type int"),
    ],
)
def test_wrong_arguments_are_named(call, said):
    with pytest.raises(ArgumentError, match=rf"({said}).*Fix: "):
        call(index_of(2))
