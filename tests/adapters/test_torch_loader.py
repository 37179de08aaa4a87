"""PackLoader: against plan and pack by hand, torch's DistributedSampler, and loops that were never cut."""

import json
import os
import pickle
import threading
import traceback
import weakref
from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.batch_tensors import assert_same
from support.models import with_pixels
from support.samples import make_sample
from torch.utils.data import DistributedSampler

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.errors import ArgumentError

OPTIONS = {"max_tokens": 40, "share_prefix": True}


def some_samples(groups=6, each=2, first=0):
    return with_pixels(
        [
            make_sample(
                [
                    ("text", [1, 2, 3 + g]),
                    ("image", (1, 4, 4), f"picture-{g}"),
                    ("response", list(range(10 + k, 14 + 2 * k))),
                ],
                f"s{g}/{k}",
                f"g{g}",
                rollout_logprobs=torch.full((4 + k,), -0.5 * g).numpy(),
            )
            for g in range(first, first + groups)
            for k in range(each)
        ]
    )


SAMPLES = some_samples()


def packed(samples, members, **options):
    return mp.pack([samples[i] for i in members], share_prefix=True, **options)


def threads():
    return [t for t in threading.enumerate() if t.name == "PackLoader"]


@pytest.fixture(autouse=True)
def no_thread_stays():
    assert threads() == []
    yield
    assert threads() == []


# ---------------------------------------------------------------- what it gives


@pytest.mark.parametrize(("prefetch", "ranks"), [(0, 1), (1, 2), (3, 1)])
def test_a_step_of_all_samples_is_plan_and_pack(prefetch, ranks):
    """Pixels of a store; columns of the samples, or of the items."""
    plan = mp.plan(SAMPLES, ranks=ranks, **OPTIONS)
    assert len(plan.bins) > 2
    store = {m.cache_key: m.pixel_values for s in SAMPLES for m in s.media}
    bare = [mp.Sample.from_dict(json.loads(json.dumps(s.to_dict()))) for s in SAMPLES]
    advantages = torch.arange(float(len(SAMPLES)))
    items = [(s, {"advantages": a}) for s, a in zip(bare, advantages, strict=True)]
    for source in (
        {"samples": bare, "loss_columns": {"advantages": advantages}},
        {"steps": [items]},
    ):
        for rank in range(ranks):
            options = {"rank": rank, "ranks": ranks, "media": store, "prefetch": prefetch}
            loader = PackLoader(**source, **options, **OPTIONS, pad_to_multiple_of=8)
            steps = iter(loader)
            step = next(steps)
            bins = [plan.bins[b] for b in plan.ranks[rank]]
            for batch, members in zip(step, bins, strict=True):
                columns = [advantages[i].expand(SAMPLES[i].num_loss_tokens) for i in members]
                more = {"pad_to_multiple_of": 8, "loss_columns": {"advantages": columns}}
                assert_same(batch, packed(SAMPLES, members, **more))
            assert list(steps) == []
            assert (step.total_tokens, step.total_samples) == (plan.total_tokens, len(SAMPLES))
            assert (len(step), step.bins, len(loader)) == (len(bins), bins, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_groups_in_the_order_of_torchs_sampler(shuffle):
    loader = PackLoader(SAMPLES, groups_per_step=4, shuffle=shuffle, seed=7, **OPTIONS)
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0, shuffle=shuffle, seed=7)
    orders = []
    for epoch in range(3):
        assert loader.epoch == epoch
        sampler.set_epoch(epoch)
        groups = [list(dict.fromkeys(s.group_id for s in step.samples)) for step in loader]
        assert [len(g) for g in groups] == [4, 2] and len(loader) == 2
        orders.append([name for g in groups for name in g])
        assert orders[-1] == [f"g{i}" for i in sampler]
    assert (orders[0] != orders[1]) == shuffle
    loader.set_epoch(1)
    again = [s.group_id for step in loader for s in step.samples][::2]
    assert again == orders[1]


def test_drop_last_and_given_groups():
    read = []

    class Lazy(list):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    names = [s.group_id for s in SAMPLES]
    loader = PackLoader(Lazy(SAMPLES), groups=names, groups_per_step=4, drop_last=True, **OPTIONS)
    [step] = list(loader)
    assert len(step.samples) == 8 and read == list(range(8))
    assert list(PackLoader([], **OPTIONS)) == []


# ---------------------------------------------------------------- ahead of its reader


@pytest.mark.parametrize("prefetch", [0, 2])
def test_so_many_are_made_ahead_and_no_more(prefetch):
    at = []

    class Steps:
        def __iter__(self):
            for number, sample in enumerate(SAMPLES):
                at.append(number)
                yield [sample]

    for number, step in enumerate(PackLoader(steps=Steps(), prefetch=prefetch, **OPTIONS)):
        [_] = step
        made = min(number + 1 + prefetch, len(SAMPLES))
        for _ in range(2000):
            if len(at) >= made:
                break
            threading.Event().wait(0.005)
        threading.Event().wait(0.01)
        assert len(at) == made


def test_no_batch_is_kept_that_was_handed_over():
    loader = PackLoader(SAMPLES, **OPTIONS)
    for step in loader:
        seen = []
        for batch in step:
            assert [r() for r in seen] == [None] * len(seen)
            seen.append(weakref.ref(batch))
            del batch
        assert len(seen) == len(step) > 2


# ---------------------------------------------------------------- resume


def run(loader, epochs):
    """(epoch, step, number, batch, state after it) of every batch up to epoch `epochs`."""
    for _ in range(loader.epoch, epochs):
        for step in loader:
            for k, batch in enumerate(step, step.first):
                yield (step.epoch, step.number, k), batch, json.dumps(loader.state_dict())


def make(samples=SAMPLES, **more):
    return PackLoader(
        samples, **{"groups_per_step": 4, "shuffle": True, "seed": 3} | OPTIONS | more
    )


WHOLE = list(run(make(), 3))


@given(cut=st.integers(0, len(WHOLE) - 1), before=st.integers(0, 2), after=st.integers(0, 2))
@settings(max_examples=12)
def test_a_loop_that_was_cut_goes_on_with_the_same_batches(cut, before, after):
    first = make(prefetch=before)
    place, _, state = next(islice(run(first, 3), cut, None))
    first.close()
    assert place == WHOLE[cut][0] and state == WHOLE[cut][2]
    second = make(prefetch=after)
    second.load_state_dict(json.loads(state))
    assert second.state_dict() == json.loads(state)
    rest = list(run(second, 3))
    assert [p for p, *_ in rest] == [p for p, *_ in WHOLE[cut + 1 :]]
    for (_, mine, mine_state), (_, theirs, their_state) in zip(rest, WHOLE[cut + 1 :], strict=True):
        assert_same(mine, theirs)
        assert mine_state == their_state
    assert second.epoch == 3


def cut_in_a_step():
    return next(json.loads(state) for (_, _, k), _, state in WHOLE if json.loads(state)["batch"])


def test_what_a_resumed_step_knows():
    state = cut_in_a_step()
    loader = make()
    loader.load_state_dict(state)
    step = next(steps := iter(loader))
    assert step.first == state["batch"] and len(step) == len(step.bins) - step.first
    assert step.total_tokens == sum(s.num_loss_tokens for s in step.samples)
    steps.close()
    loader.set_epoch(state["epoch"])
    # a loop that was left, not cut: the next one begins with the epoch
    step = next(steps := iter(loader))
    assert (step.number, step.first) == (0, 0)
    steps.close()
    loader.load_state_dict(state)
    loader.set_epoch(state["epoch"])
    assert loader.state_dict() == state  # a place of its epoch stays
    loader.set_epoch(state["epoch"] + 1)
    assert loader.state_dict()["batch"] == 0
    loader.set_epoch(10**30)  # more than a seed of torch holds
    assert len(list(loader)) == len(loader)


def test_a_state_of_another_loader():
    state = cut_in_a_step()
    with pytest.raises(ArgumentError, match=r"seed=3, this one's is 4\. Fix"):
        make(seed=4).load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"max_tokens=40.*between steps"):
        make(max_tokens=39).load_state_dict(state)
    make(max_tokens=39).load_state_dict(state | {"batch": 0, "step_digest": None})
    for odd in ({}, None, {"epoch": 1}):
        with pytest.raises(ArgumentError, match="not a state"):
            make().load_state_dict(odd)
    with pytest.raises(ArgumentError, match="version 0"):
        make().load_state_dict(state | {"version": 0})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("epoch", ("1", -1, None)),
        ("step", (1.5, [1])),
        ("batch", (-1, 1.5)),
        ("order", (None, [1])),
        ("planned", ("x",)),
        ("step_digest", (1, b"x")),
        ("samples_digest", ([1],)),
    ],
)
def test_states_of_wrong_types(name, values):
    loader = make()
    for value in values:
        with pytest.raises(ArgumentError, match=rf"PackLoader: the state's {name} is .*Fix: "):
            loader.load_state_dict(cut_in_a_step() | {name: value})
    assert loader.state_dict() == make().state_dict()


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("change", [{"step": 10**9}, {"batch": 10**9}, {"step": 3, "batch": 1}])
def test_a_state_beyond_the_epochs_end(steps, change):
    """Nothing of the epoch would be read, in silence."""
    cut = [SAMPLES[:4], SAMPLES[4:8], SAMPLES[8:]]
    options = OPTIONS | {"max_tokens": 14}
    made = PackLoader(steps=cut, **options) if steps else make(**options)
    with made as loader:
        step = next(iter(loader))
        next(iter(step))
        state = loader.state_dict()
        assert state["batch"] == 1 and len(step.bins) > 1
        loader.load_state_dict(state | change)
        with pytest.raises(ArgumentError, match=r"the state goes on at|batches unlike those"):
            list(loader)
        # saved after the last batch of an epoch: nothing is left of it
        loader.load_state_dict(state | {"step": len(loader), "batch": 0, "step_digest": None})
        assert list(loader) == [] and loader.epoch == 1


@pytest.mark.parametrize("other", [some_samples(5), some_samples(first=3), SAMPLES[::-1]])
def test_other_groups_than_when_the_state_was_saved(other):
    """Also between steps, where the order of the groups decides what was read."""
    with make(groups_per_step=2) as loader:
        for number, step in enumerate(loader):
            between = loader.state_dict()
            if number == 1:
                next(iter(step))
                break
        for state in (between, loader.state_dict()):
            again = make(other, groups_per_step=2)
            again.load_state_dict(state)
            assert again.state_dict() == state
            with pytest.raises(ArgumentError, match=r"other samples: group names.*Fix: "):
                next(iter(again))


def test_other_tokens_of_a_step_that_was_cut():
    states = []
    for rank in range(2):
        with PackLoader(SAMPLES, **OPTIONS, rank=rank, ranks=2) as loader:
            next(iter(next(iter(loader))))
            states.append(loader.state_dict())
    assert states[0] == states[1] and states[0]["batch"] == 1  # all ranks have one
    other = some_samples()
    other[-1].input_ids = np.append(other[-1].input_ids[:-1], 77)
    loader = PackLoader(other, **OPTIONS, ranks=2)
    loader.load_state_dict(states[0])
    with pytest.raises(ArgumentError, match="samples or batches unlike"):
        next(iter(loader))


def test_batches_share_as_planned():
    """Two ranks, and one group whose prefix is too short to pay."""
    short = [
        make_sample(
            [("text", [1]), ("response", range(6000 * k + 5, 6000 * k + 5000))],
            f"short/{k}",
            "short",
        )
        for k in range(2)
    ]
    samples = [*SAMPLES[:2], *short]
    options = {"max_tokens": 12_000, "share_prefix": "auto", "ranks": 2}
    options["cost"] = lambda *_: 1.0  # else the long group would be split
    plan = mp.plan(samples, **options)
    assert sorted(plan.share) == [False, True]
    found = {}
    for rank in range(2):
        for batch in next(iter(PackLoader(samples, **options, rank=rank, prefetch=0))):
            found[batch.sample_ids[0]] = batch
    for members, share in zip(plan.bins, plan.share, strict=True):
        own = [samples[i] for i in members]
        assert_same(found[own[0].sample_id], mp.pack(own, share_prefix=share))


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_arrives_with_its_line_and_place(prefetch):
    class Broken(list):
        def __getitem__(self, i):
            if i == 9:
                raise KeyError("no such picture")
            return super().__getitem__(i)

    names = [s.group_id for s in SAMPLES]
    loader = make(Broken(SAMPLES), groups=names, shuffle=False, prefetch=prefetch)
    seen = 0
    with pytest.raises(KeyError, match="no such picture") as caught:
        for step in loader:
            seen += len(list(step))
    assert seen > 0
    assert "__getitem__" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert caught.value.__notes__ == ["PackLoader: in epoch 0, step 1, batch 0"]


def test_a_loop_that_is_left_ends_its_thread():
    loader = make()
    for number, step in enumerate(loader):
        assert step.number == number
        for _ in step:
            break  # the rest of a step that is left is skipped
    assert number == 1 and loader.epoch == 1
    for _ in loader:
        break
    assert threads() == []
    iter(loader)  # not begun
    assert threads() == []
    with loader:
        steps = iter(loader)
        batches = iter(next(steps))
        assert len(threads()) == 1
    assert threads() == []
    for left in (batches, steps):
        with pytest.raises(ArgumentError, match="ended this loop"):
            list(left)
    first = iter(loader)
    next(first)
    assert len([b for step in loader for b in step]) > 0
    with pytest.raises(ArgumentError, match="ended this loop"):
        next(first)  # a second one began


def test_a_step_gives_its_batches_once_and_in_its_loop():
    with make() as loader:
        step = next(iter(loader))
        iter(step)
        with pytest.raises(ArgumentError, match="its batches were read already"):
            iter(step)
    for step in list(make()):
        with pytest.raises(ArgumentError, match="is over"):
            iter(step)
    readers = [iter(step) for step in make()]  # begun in time, read too late
    assert [list(reader) for reader in readers] == [[], []]


def test_pickle_keeps_the_place():
    loader = make()
    loader.load_state_dict(cut_in_a_step())
    loop = (b for step in loader for b in step)
    expected = next(loop)
    copy = pickle.loads(pickle.dumps(loader))
    follows = next(loop)
    loop.close()
    again = (b for step in copy for b in step)
    assert_same(next(again), follows)
    again.close()
    assert expected.sample_ids != follows.sample_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_says_that_the_thread_is_not_there():
    loader = make()
    steps = iter(loader)
    next(steps)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(steps)
        except ArgumentError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert "fork" in said.read()
    steps.close()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"samples": None}, "samples or steps"),
        ({"samples": [{}]}, r"items\[0\] is dict"),
        ({"samples": iter(SAMPLES)}, "lacks a length"),
        ({"loss_columns": {"advantages": [1.0]}}, "advantages has 1 entries for 12 samples"),
        ({"groups": ["g"]}, "groups has 1 entries"),
        ({"samples": None, "steps": [SAMPLES], "shuffle": True}, "steps bring their own order"),
        ({"samples": None, "steps": 3}, "steps is of type int"),
        ({"rank": 1}, "of 1 ranks"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"groups_per_step": 0}, "groups_per_step is 0"),
        ({"share_prefix": "Auto"}, "share_prefix is 'Auto'"),
        ({"loss_columns": [1.0]}, "loss_columns is of type list"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": ["cpu"]}, "device is of type list"),
    ],
)
def test_refused(wrong, says):
    with pytest.raises(ArgumentError, match=says):
        list(PackLoader(**{"samples": SAMPLES, **OPTIONS} | wrong))
