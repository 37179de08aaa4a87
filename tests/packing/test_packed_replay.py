"""Kept ids, teachers and routes of a batch, against plain loops over its samples."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_tensors import assert_same
from support.samples import kept_of, make_sample, routes_of, teacher_of

import mmpack as mp
from mmpack.errors import ArgumentError, SchemaError
from mmpack.ops.logprobs.support import ScoredSupport, Support


def answer(k, ids, prompt=(1, 2, 3), rng=None, **fields):
    sample = make_sample([("text", prompt), ("response", ids, 0)], sample_id=f"s{k}", **fields)
    rng = rng or np.random.default_rng(k)
    sample.kept_ids = kept_of(sample, rng)
    sample.teachers = {"t": teacher_of(sample, rng)}
    return sample


def routed(samples, experts=8, seed=0):
    """The same routes for the same tokens on the same path, as an engine that is batch-invariant has them."""
    taken, rng = {}, np.random.default_rng(seed)
    for sample in samples:
        rows = [
            taken.setdefault(
                sample.input_ids[: i + 1].tobytes(), routes_of(sample, rng, 2, 2, experts)[0]
            )
            for i in range(len(sample))
        ]
        sample.routed_experts = np.stack(rows)
    return samples


def lists_of(support):
    ends = support.offsets.tolist()
    return [support.ids[a:b].tolist() for a, b in pairwise(ends)]


@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(10, 12), max_size=4), min_size=1, max_size=5),
    share=st.booleans(),
    experts=st.sampled_from([8, 300]),
    multiple=st.sampled_from([None, 8]),
    seed=st.integers(0, 99),
)
def test_a_batch_has_what_its_samples_have(answers, share, experts, multiple, seed):
    rng = np.random.default_rng(seed)
    samples = routed([answer(k, ids, rng=rng) for k, ids in enumerate(answers)], experts, seed)
    wanted = [row.tolist() for s in samples for row in s.kept_ids.lists()]
    taught = [row.tolist() for s in samples for row in s.teachers["t"].lists()]
    scores = [v for s in samples for v in s.teachers["t"].logprobs.tolist()]
    packed = mp.pack(samples, share_prefix=share, pad_to_multiple_of=multiple)
    for batch in (packed, mp.pad(samples, pad_to_multiple_of=multiple), mp.pad(samples, "right")):
        n = batch.num_loss_tokens
        if n:
            assert type(batch.kept_ids) is Support and lists_of(batch.kept_ids) == wanted
            assert batch.kept_ids.offsets.dtype == batch.kept_ids.ids.dtype == torch.int64
            teacher = batch.teachers["t"]
            assert type(teacher) is ScoredSupport and lists_of(teacher) == taught
            assert teacher.logprobs.tolist() == scores and teacher.logprobs.dtype == torch.float32
            for n in range(len(wanted)):
                assert int(batch.loss_targets[n]) in wanted[n]
            apart = batch.unpack_loss(batch.kept_ids)
            assert [lists_of(x) for x in apart] == [
                [row.tolist() for row in s.kept_ids.lists()] for s in samples
            ]
            again = ScoredSupport.cat(batch.unpack_loss(teacher))
            assert torch.equal(again.offsets, teacher.offsets) and torch.equal(
                again.ids, teacher.ids
            )
        else:
            assert batch.kept_ids is None and batch.teachers == {}
        routes = batch.routed_experts
        assert routes.dtype == (torch.uint8 if experts == 8 else torch.int32)
        for sample, own in zip(samples, batch.unpack_tokens(routes), strict=True):
            assert own.tolist() == sample.routed_experts.tolist()
    total = packed.input_ids.numel()
    assert packed.routed_experts.shape == (total, 2, 2)
    assert not packed.routed_experts[packed.num_tokens :].any()
    if share:  # one row for each distinct beginning
        paths = {s.input_ids[: i + 1].tobytes() for s in samples for i in range(len(s))}
        assert packed.num_tokens >= len(paths)
        assert packed.num_tokens <= sum(map(len, samples)) - 3 * (len(samples) - 1)


def pair():
    samples = [answer(k, [20 + k, 30], prompt=range(1, 9)) for k in range(2)]
    return routed(samples)


@pytest.mark.parametrize(("at", "experts"), [(0, 8), (3, 300), (7, 8)])
def test_unlike_routes_end_a_shared_segment(at, experts):
    samples = routed(pair(), experts)
    assert mp.pack(samples, share_prefix=True).segment_offsets.tolist() == [0, 8, 10, 12]
    samples[1].routed_experts[at, 1] = samples[1].routed_experts[at, 1, ::-1]  # another order too
    batch = mp.pack(samples, share_prefix=True)
    ends = [0, at, 10, 20 - at] if at else [0, 10, 20]
    assert batch.segment_offsets.tolist() == ends
    for sample, own in zip(samples, batch.unpack_tokens(batch.routed_experts), strict=True):
        assert own.tolist() == sample.routed_experts.tolist()
    assert mp.plan(samples, max_tokens=64, share_prefix=True).stats["rows_shared"] == ends[-1]


def test_unlike_routes_within_a_picture_share_none_of_it():
    parts = [("text", [1, 2]), ("image", (1, 4, 6), "plan"), ("text", [3])]
    samples = [
        make_sample([*parts, ("response", [20 + k], 0)], sample_id=f"s{k}") for k in range(2)
    ]
    routed(samples)
    assert mp.pack(samples, share_prefix=True).segment_offsets.tolist() == [0, 11, 12, 13]
    start, stop = samples[0].modality_spans[0].start, samples[0].modality_spans[0].stop
    last = samples[1].routed_experts[stop - 1]
    samples[1].routed_experts[stop - 1] = (last + 1) % 8
    batch = mp.pack(samples, share_prefix=True)
    assert batch.segment_offsets.tolist() == [0, start, 12, 24 - start]
    assert len(batch.media_order) == 2 and len(batch.media) == 1


@pytest.mark.parametrize("of", [mp.pack, mp.pad])
@pytest.mark.parametrize("name", ["kept_ids", "routed_experts"])
def test_only_some_samples_have_it(of, name):
    samples = pair()
    setattr(samples[1], name, None)
    with pytest.raises(
        SchemaError, match=rf"s1\.{name} has none, but the samples before it .+ \(MM408\)"
    ):
        of(samples)
    batch = of(samples, on_invalid="drop")
    assert batch.sample_ids == ["s0"] and [p.code for p in batch.dropped] == ["MM408"]
    with pytest.raises(SchemaError, match="MM408"):
        of(samples[::-1])


def test_routes_of_two_models_are_not_packed():
    samples = pair()
    samples[1].routed_experts = np.zeros((10, 3, 1), np.uint8)
    with pytest.raises(
        SchemaError, match="1 experts in each of 3 layers, but the samples before it 2 exp"
    ):
        mp.pack(samples)


def test_a_teacher_that_only_some_samples_have_says_nothing_of_others():
    samples = pair()
    samples[0].teachers = {"math": samples[0].teachers["t"]}
    batch = mp.pack(samples)
    assert list(batch.teachers) == ["math", "t"]
    assert lists_of(batch.teachers["math"])[2:] == [[], []] == lists_of(batch.teachers["t"])[:2]
    assert batch.teachers["t"].logprobs.tolist() == samples[1].teachers["t"].logprobs.tolist()


def test_batches_move_and_collate():
    batch = mp.pack(pair(), share_prefix=True)
    assert_same(
        mp.collate([(s, {"advantages": 1.0}) for s in pair()], share_prefix=True).to("cpu"),
        mp.pack(pair(), share_prefix=True, loss_columns={"advantages": np.ones(4, np.float64)}),
    )
    moved = batch.to("meta")
    for x in (moved.kept_ids, moved.teachers["t"]):
        assert x.ids.device.type == x.offsets.device.type == "meta"
    assert moved.teachers["t"].logprobs.is_meta and moved.routed_experts.is_meta
    assert " ids in 4 lists, " in repr(batch) and "teachers=['t']" in repr(batch)


@pytest.mark.gpu
def test_batches_move_to_a_gpu():
    batch = mp.pack(pair(), share_prefix=True, pin_memory=True)
    assert batch.kept_ids.ids.is_pinned() and batch.teachers["t"].logprobs.is_pinned()
    moved = batch.to("cuda", non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    assert_same(moved.to("cpu"), mp.pack(pair(), share_prefix=True))
    rows = torch.tensor([3, 0], device="cuda")
    assert lists_of(moved.kept_ids[rows]) == [lists_of(batch.kept_ids)[k] for k in (3, 0)]


def test_lists_are_sliced_and_joined():
    support = Support(torch.tensor([0, 2, 2, 3]), torch.tensor([3, 7, 5]))
    assert lists_of(support[torch.tensor([2, 0, 1, 2])]) == [[5], [3, 7], [], [5]]
    assert lists_of(support[1:]) == [[], [5]] and len(support[:0]) == 0
    assert lists_of(Support.cat([support, support[:1]])) == [[3, 7], [], [5], [3, 7]]
    assert [len(part) for part in support.split([1, 0, 2])] == [1, 0, 2]
    with pytest.raises(ArgumentError, match=r"^Support: it is indexed by .+ Fix: "):
        support[0]
    scored = ScoredSupport(support.offsets, support.ids, torch.zeros(3))
    for wrong, says in (
        (lambda: support[torch.tensor([3])], "does not fit its 3 lists"),
        (lambda: support[torch.tensor([[0]])], r"indexed by a tensor of shape \[1, 1\]"),
        (lambda: support.split([1]), "counts add up to 1 for 3 lists"),
        (lambda: Support.cat([support, scored]), "a part is of type ScoredSupport"),
        (lambda: Support.cat([]), "there is nothing to join"),
    ):
        with pytest.raises(ArgumentError, match=f"{says}.*Fix: "):
            wrong()
    with pytest.raises(ArgumentError, match="unpack_loss: x has 3 lists, expected 4"):
        mp.pack(pair()).unpack_loss(support)
