"""vime's and slime's samples, by a class of the fields that their sources name: there is no package of either."""

import copy
import enum
import itertools

import numpy as np
import pytest
import torch
from matrix.vime_trace import items as made_items
from support.same import assert_equal
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.adapters.vime import from_batch, from_samples, to_samples
from mmpack.errors import ArgumentError, LayoutError, MmpackError
from mmpack.schema.ragged import Ragged


class Status(enum.Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


UNSET = ("group_index", "index", "multimodal_inputs", "multimodal_train_inputs", "label", "reward")
UNSET += ("loss_mask", "rollout_log_probs", "teacher_log_probs", "rollout_routed_experts")
UNSET += ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
SET = {"prompt": "", "response": "", "response_length": 0, "remove_sample": False}


class Documented:
    """The documented fields, `to_dict` and `from_dict`: unknown keys become attributes."""

    def __init__(self, **fields):
        empty = {"tokens": [], "weight_versions": [], "metadata": {}, "prefix_cache_info": {}}
        vars(self).update(dict.fromkeys(UNSET) | SET | empty | fields)

    def to_dict(self):
        return vars(self) | {"status": self.status.value}

    @classmethod
    def from_dict(cls, data):
        return cls(**data | {"status": Status(data["status"])})


def changed(item, **fields):
    return Documented(**vars(item) | fields)


@pytest.fixture
def items(fixture):
    out = [Documented.from_dict(copy.copy(item)) for item in made_items(fixture)]
    out[1].loss_mask = [1, 0, 0] + [1] * (out[1].response_length - 3)
    out[1].reward = {"format": 1.0, "answer": 0.5, "why": "right"}
    out[1].weight_versions = ["3", "4"]
    out[2].reward = 0.25
    out[2].prefix_cache_info = {"cached_tokens": 11, "total_prompt_tokens": 50}
    out[3].status = Status.TRUNCATED
    out[6].metadata = {"tools": [(1, 2)], b"k": float("inf")}
    out[7].later_field = "kept"
    return out


@pytest.fixture
def replayed(items):
    """What the engine did, too, in the forms in which they come."""
    out, draw = items, np.random.default_rng(5)
    out[4].teacher_log_probs = (-draw.random(out[4].response_length)).tolist()
    out[5].rollout_routed_experts = torch.from_numpy(routes_of(out[5], 300, draw).astype(np.int32))
    out[3].rollout_routed_experts = routes_of(out[3], 9, draw).tolist()
    for item, kind in ((out[1], list), (out[2], torch.tensor), (out[6], sorted)):
        ids, offsets = kept_lists(item, draw)
        if kind is sorted:  # as they would be made again
            lists = [sorted(ids[a:b]) for a, b in itertools.pairwise(offsets)]
            ids, kind = list(itertools.chain(*lists)), torch.tensor
        dtype = {"dtype": torch.int32} if kind is torch.tensor else {}
        item.rollout_top_p_token_ids = kind(ids, **dtype)
        item.rollout_top_p_token_offsets = kind(offsets, **dtype)
    return out


def routes_of(item, experts, draw):
    """int64 [L - 1, 2, 4], four of them per token and layer."""
    return draw.random((len(item.tokens) - 1, 2, experts)).argsort(-1)[..., :4]


def kept_lists(item, draw):
    """Some ids and the token for each response token; none for a tool's."""
    ids, offsets = [], [0]
    start = len(item.tokens) - item.response_length
    for token, m in zip(item.tokens[start:], item.loss_mask, strict=True):
        if m:
            others = set(draw.choice(900, draw.integers(0, 4), replace=False).tolist()) - {token}
            ids += [token, *sorted(others, reverse=True)]
        offsets.append(len(ids))
    return ids, offsets


def test_what_the_engine_did_is_replayed(replayed, fixture):
    samples = to_samples(replayed, fixture.processor)
    for k in (1, 2, 6):
        item, s = replayed[k], samples[k]
        ids, ends = (
            list(map(int, getattr(item, f"rollout_top_p_token_{n}"))) for n in ("ids", "offsets")
        )
        lists = [ids[a:b] for a, b in itertools.pairwise(ends)]
        expected = [sorted(x) for x, m in zip(lists, item.loss_mask, strict=True) if m]
        assert [x.tolist() for x in s.kept_ids.lists()] == expected
    teacher = samples[4].teachers["teacher"]
    assert teacher.ids.tolist() == samples[4].input_ids[samples[4].loss_indices].tolist()
    kept = [
        x for x, m in zip(replayed[4].teacher_log_probs, replayed[4].loss_mask, strict=True) if m
    ]
    assert np.array_equal(teacher.logprobs, np.float32(kept))
    for k in (3, 5):  # one dtype for all
        routes = samples[k].routed_experts
        assert routes.dtype == np.uint16 and routes.shape == (len(replayed[k].tokens), 2, 4)
        assert np.array_equal(routes[:-1], np.asarray(replayed[k].rollout_routed_experts))
    few = to_samples(replayed[3:4], fixture.processor, num_experts=9)
    assert few[0].routed_experts.dtype == np.uint8
    assert mp.validate(samples) == []
    back = from_samples([samples[1]])[0]
    assert back["rollout_top_p_token_ids"] == replayed[1].rollout_top_p_token_ids


def test_the_engine_s_part_of_samples_from_elsewhere(processed, fixture):
    one = copy.copy(processed[0])
    n, length = one.num_loss_tokens, len(one)
    targets = one.input_ids[one.loss_indices]
    one.kept_ids = Ragged.of([sorted({int(t), 5}) for t in targets])
    one.teachers = {"teacher": Ragged.of([[int(t)] for t in targets], [[-0.5]] * n)}
    one.routed_experts = np.arange(length * 4, dtype=np.uint16).reshape(length, 2, 2)
    assert mp.validate([one]) == []
    made = from_samples([one])[0]
    assert made["rollout_routed_experts"].shape == (length - 1, 2, 2)
    assert made["rollout_routed_experts"].dtype == torch.int32
    assert made["teacher_log_probs"] == [-0.5] * n
    again = to_samples([made], fixture.processor, num_experts=4 * length)[0]
    assert again.kept_ids == one.kept_ids and again.teachers == one.teachers
    assert np.array_equal(again.routed_experts[:-1], one.routed_experts[:-1])
    changed = to_samples([made], fixture.processor)[0]
    changed.kept_ids = Ragged.of([[int(t)] for t in targets])
    offsets = from_samples([changed])[0]["rollout_top_p_token_offsets"]
    assert offsets.tolist() == list(range(n + 1))


def test_replay_that_doesn_t_fit_is_one_line(replayed, fixture):
    good = vars(replayed[2]) | {"rollout_routed_experts": None}
    ids, offsets = good["rollout_top_p_token_ids"], good["rollout_top_p_token_offsets"]
    wrong = (
        ({"rollout_top_p_token_ids": None}, "must be passed together"),
        ({"rollout_top_p_token_offsets": offsets[1:]}, "kept_ids"),
        ({"rollout_top_p_token_ids": ids[1:]}, "kept_ids"),
        ({"rollout_top_p_token_ids": ids.float()}, "expected integers"),
        ({"rollout_routed_experts": torch.zeros(3, 2, 2, dtype=torch.int32)}, "routing"),
        ({"rollout_routed_experts": [[1]]}, "expected integers"),
        ({"teacher_log_probs": [0.0]}, "loss_mask_shift"),
    )
    for change, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            to_samples([good | change], fixture.processor)


def test_samples_are_what_it_holds(items, fixture):
    samples = to_samples(items, fixture.processor)
    for item, s in zip(items, samples, strict=True):
        assert s.input_ids.tolist() == item.tokens
        start = len(s) - item.response_length
        mask = item.loss_mask
        expected = [start + k for k, m in enumerate(mask) if m]
        assert s.loss_indices.tolist() == expected
        kept = np.float32([lp for lp, m in zip(item.rollout_log_probs, mask, strict=True) if m])
        assert np.array_equal(s.rollout_logprobs, kept)
    assert [r.name for r in samples[1].rewards] == ["format", "answer"]
    assert samples[1].policy_versions is None and samples[0].policy_versions[0].version == "0"
    assert samples[2].prefix_cached_tokens == 11
    assert samples[3].finish_reason == "length"
    assert [(s.start, s.stop) for s in samples[1].observation_spans] == [
        (samples[1].loss_spans[0].stop, samples[1].loss_spans[0].stop + 2)
    ]
    assert mp.validate(samples) == []


def test_everything_comes_back_from_a_trace_file_too(replayed, fixture, tmp_path):
    samples = to_samples(replayed, fixture.processor)
    back = from_samples(samples, sample_class=Documented)
    with pytest.raises(MmpackError, match="type PngImageFile"):
        mp.write_trace(tmp_path / "t.jsonl", samples)
    bare = [changed(item, multimodal_inputs=None) for item in replayed]
    named = to_samples(bare, fixture.processor, images=fixture.images())
    assert mp.compare(named, samples).ok
    mp.write_trace(tmp_path / "t.jsonl", named)
    store = {m.cache_key: m.pixel_values for s in named for m in s.media}
    read = list(mp.read_trace(tmp_path / "t.jsonl"))
    from_file = from_samples(read, media=store, sample_class=Documented)
    for a, b in zip([*back, *from_file], [*replayed, *bare], strict=True):
        assert type(a) is Documented and vars(a).keys() == vars(b).keys()
        assert_equal(vars(a), vars(b))


def test_a_packed_batch_comes_back_with_its_columns(items, fixture):
    samples = to_samples(items, fixture.processor)
    values = torch.arange(sum(s.num_loss_tokens for s in samples), dtype=torch.float32)
    batch = mp.pack(samples, share_prefix=True, loss_columns={"advantages": values})
    back = from_batch(batch, samples)
    kept = [
        v
        for made, item in zip(back, items, strict=True)
        for v, m in zip(made["advantages"], item.loss_mask, strict=True)
        if m
    ]
    assert kept == values.tolist()
    assert back[1]["advantages"][1:3] == [0.0, 0.0]
    with pytest.raises(ArgumentError, match="not those of the batch"):
        from_batch(batch, samples[1:])


def test_samples_from_elsewhere(items, processed, fixture):
    made = from_samples(processed)
    recorded = to_samples(items[:2], fixture.processor)
    numbers = [one["group_index"] for one in from_samples([*recorded, *processed])]
    groups = set(zip(numbers[2:], [s.group_id for s in processed], strict=True))
    assert len(groups) == len({s.group_id for s in processed}) == len(set(numbers[2:]))
    assert not set(numbers[:2]) & set(numbers[2:])  # theirs keep their own
    again = to_samples(made, fixture.processor, images=fixture.images())
    for sample, (sample_id, group_id) in zip(again, fixture.ids, strict=True):
        sample.sample_id, sample.group_id = sample_id, group_id
    assert mp.compare(processed, again).ok
    for a, b in zip(processed, again, strict=True):
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)


def test_a_removed_sample_has_no_loss(items, fixture):
    items[0].remove_sample = True
    samples = to_samples(items, fixture.processor)
    assert samples[0].num_loss_tokens == 0 and samples[2].num_loss_tokens > 0
    assert mp.validate(samples) == []
    back = from_samples(samples[:1], sample_class=Documented)[0]
    assert back.remove_sample and back.loss_mask == items[0].loss_mask
    assert back.rollout_log_probs == items[0].rollout_log_probs


def test_groups_and_what_doesn_t_fit(items, fixture):
    alone = [changed(item, group_index=None, index=None) for item in items]
    names = [s.group_id for s in to_samples(alone, fixture.processor)]
    assert names == [str(i) for i in range(len(items))]
    samples = to_samples(items, fixture.processor)
    one = [[0.0] * s.num_loss_tokens for s in samples]
    for columns in (one[1:], [one[0][:1], *one[1:]], [[*one[0], 0.0], *one[1:]]):
        with pytest.raises(ArgumentError, match=r"advantages has \d+ entries for"):
            from_samples(samples, {"advantages": columns})
    with pytest.raises(ArgumentError, match="images has 1 entries"):
        to_samples(items, fixture.processor, images=[[]])
    wrong = (
        ({}, "has no tokens"),
        (vars(items[0]) | {"tokens": [1, 2]}, "response_length is"),
        (vars(items[0]) | {"reward": "right"}, "reward is 'right'"),
    )
    for item, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            to_samples([item], fixture.processor)


def test_traps_are_named(items, fixture):
    items[0].loss_mask = items[0].loss_mask[1:]
    with pytest.raises(ArgumentError, match=r"items\[0\].*loss_mask_shift"):
        to_samples(items, fixture.processor)
    items[1] = changed(items[1], tokens=items[1].tokens[:9], response_length=0, loss_mask=[])
    items[1].rollout_log_probs = []
    with pytest.raises(LayoutError, match=r"items\[0\].*empty_response"):
        to_samples(items[1:2], fixture.processor)
    two = next(i for i, images in enumerate(fixture.images()) if len(images) == 2)
    inputs = dict(items[two].multimodal_train_inputs)
    first = int(inputs["image_grid_thw"][0].prod())
    inputs |= {
        "image_grid_thw": inputs["image_grid_thw"][:1],
        "pixel_values": inputs["pixel_values"][:first],
    }
    items[two].multimodal_train_inputs = inputs
    with pytest.raises(LayoutError, match="dropped_image"):
        to_samples(items[two : two + 1], fixture.processor)


def test_the_page_s_example(items, fixture):
    page = "docs/adapters.md"
    [code] = [block for block in blocks(page) if "sample_class=Sample" in block[1]]
    names = {"rollout": items, "processor": fixture.processor, "Sample": Documented}
    ran = run(page, names, [code])
    assert [type(item) for item in ran["rollout"]] == [Documented] * len(ran["samples"])
    assert [item.tokens for item in ran["rollout"]] == [
        s.input_ids.tolist() for s in ran["samples"]
    ]
