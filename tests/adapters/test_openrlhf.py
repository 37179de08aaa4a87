"""OpenRLHF's real Experience, its batch functions and its replay buffer, in and out."""

import copy
from dataclasses import fields

import numpy as np
import pytest
import torch
from support.same import assert_equal
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.adapters.loss_values import loss_columns
from mmpack.adapters.openrlhf import from_batch, from_samples, to_samples
from mmpack.errors import ArgumentError, LayoutError

pytestmark = pytest.mark.openrlhf
IMAGE_PAD = 151655


@pytest.fixture(scope="session")
def made(fixture):
    """One Experience, prompts by OpenRLHF's vlm_utils, joined by its own function."""
    from matrix.openrlhf_trace import experience

    return experience(fixture)


@pytest.fixture
def experience(made):
    """As the experience maker leaves it: columns, rewards, info; tool tokens in a response."""
    out = copy.deepcopy(made)
    draw = torch.Generator().manual_seed(2)
    row = out.action_mask[1].nonzero()[:, 0]
    out.action_mask[1, row[1:3]] = 0
    shape = tuple(out.action_mask.shape)
    for name in ("action_log_probs", "base_action_log_probs", "values", "advantages", "kl"):
        setattr(out, name, torch.randn(shape, generator=draw))
    out.returns = torch.randn(shape, generator=draw).bfloat16()
    out.rewards = out.info["score"] = torch.randn(shape[0], generator=draw)
    out.scores = torch.ones(shape[0])
    out.index = list(range(shape[0]))
    out.labels = [str(i) for i in out.index]
    out.info["group"] = [["a", i] for i in out.index]
    return out


@pytest.fixture
def buffer(monkeypatch):
    """A replay buffer; without a GPU there is no current device to ask for."""
    from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return NaiveReplayBuffer(sample_batch_size=4, cpu_offload=False)


def test_samples_are_what_openrlhf_holds(made, fixture):
    samples = to_samples(made, fixture.processor, images=fixture.images())
    for b, s in enumerate(samples):
        assert np.array_equal(s.input_ids, made.sequences[b][made.attention_mask[b].bool()])
        assert s.input_ids[s.loss_indices].tolist() == fixture.rows[b][1]
        assert s.rollout_logprobs.tolist() == fixture.rows[b][2]
        assert [list(m.grid_thw) for m in s.media] == made.mm_train_inputs[b][
            "image_grid_thw"
        ].tolist()
        assert s.finish_reason == "stop"
    assert mp.validate(samples) == []
    assert len({s.group_id for s in samples}) == len(fixture.texts)


def test_an_experience_comes_back_bit_for_bit(experience, fixture, tmp_path):
    """In memory, through a file and through a pack."""
    samples = to_samples(experience, fixture.processor)
    assert_same(from_samples(samples), experience)
    mp.write_trace(tmp_path / "t.jsonl", samples)
    store = {m.cache_key: m.pixel_values for s in samples for m in s.media}
    assert_same(from_samples(list(mp.read_trace(tmp_path / "t.jsonl")), media=store), experience)
    columns = loss_columns(samples)
    assert set(columns) == {"old_logprobs", "ref_logprobs", "advantages", "returns", "values", "kl"}
    mask = experience.action_mask.bool()
    assert torch.equal(torch.cat(columns["advantages"]), experience.advantages[mask])
    batch = mp.pack(samples, share_prefix=True, loss_columns=columns)
    assert_same(from_batch(batch, samples), experience)
    batch.loss_columns["old_logprobs"] = torch.arange(batch.num_loss_tokens, dtype=torch.float32)
    changed = from_batch(batch, samples).action_log_probs
    assert torch.equal(changed[mask], torch.arange(int(mask.sum()), dtype=torch.float32))
    assert torch.equal(changed[~mask], experience.action_log_probs[~mask])
    batch.loss_columns["colour"] = batch.loss_columns["kl"]
    with pytest.raises(ArgumentError, match="'colour'"):
        from_batch(batch, samples)


def test_the_replay_buffer_s_items(experience, fixture, buffer):
    from openrlhf.trainer.ppo_utils.experience import make_experience_batch

    whole = to_samples(copy.deepcopy(experience), fixture.processor)
    buffer.append(experience)
    items = [buffer[i] for i in range(len(buffer))]
    samples = to_samples(items, fixture.processor)
    for a, b in zip(whole, samples, strict=True):
        assert np.array_equal(a.input_ids, b.input_ids)
        assert a.loss_spans[0].start == b.loss_spans[0].start
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)
        assert a.media_cache_keys == b.media_cache_keys
    for part in (range(len(items)), (5, 0, 2)):  # the longest row may be left out
        expected = make_experience_batch([items[i] for i in part])
        # it pads ids with 0, a text token of Qwen's; concat_experiences pads with the pad id
        expected.sequences[expected.attention_mask == 0] = fixture.processor.family.pad_token_id
        assert_same(from_samples([samples[i] for i in part]), expected)


def test_what_comes_back_goes_into_the_buffer(experience, fixture, buffer):
    buffer.append(from_samples(to_samples(experience, fixture.processor)))
    own = list(buffer.items)
    buffer.clear()
    buffer.append(experience)
    for a, b in zip(own, buffer.items, strict=True):
        assert_same(a, b)


def test_samples_from_elsewhere_become_an_experience(processed, fixture, buffer):
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    made = from_samples(processed)
    merged = merge_mm_train_inputs(made.mm_train_inputs, "cpu")
    assert len(merged["pixel_values"]) == sum(s.num_patches for s in processed)
    groups = [s.group_id for s in processed]
    again = to_samples(made, fixture.processor, images=fixture.images(), group_ids=groups)
    assert mp.compare(processed, again).ok
    buffer.append(made)
    assert len(buffer) == len(processed)


def test_a_group_is_of_the_prompt_s_pictures(made, fixture):
    """A tool's picture, in the response, moves no row to a group of its own."""
    rows = copy.deepcopy(made)
    first = next(b for b, inputs in enumerate(rows.mm_train_inputs) if inputs)
    groups = [s.group_id for s in to_samples(rows, fixture.processor)]
    rows.mm_train_inputs[first]["pixel_values"] = rows.mm_train_inputs[first]["pixel_values"] + 1
    changed = [s.group_id for s in to_samples(rows, fixture.processor)]
    assert [a == b for a, b in zip(groups, changed, strict=True)].count(False) == 1
    rows.action_mask[first, 0] = 1  # its prompt is one token now, all pictures come later
    one = to_samples(rows, fixture.processor)[first].group_id
    rows.mm_train_inputs[first]["pixel_values"] = rows.mm_train_inputs[first]["pixel_values"] + 1
    assert to_samples(rows, fixture.processor)[first].group_id == one


def test_a_row_without_pictures_first(made, fixture):
    samples = to_samples(made, fixture.processor)
    samples[0].metadata["openrlhf"].value["inputs"] = None  # as of an item without mm_train_inputs
    samples[0].media, samples[0].modality_spans = [], []
    inputs = from_samples(samples).mm_train_inputs
    assert inputs[0] is None
    for own, expected in zip(inputs[1:], made.mm_train_inputs[1:], strict=True):
        assert_equal(own, expected, "mm_train_inputs")


def test_what_doesn_t_fit_is_named(made, fixture):
    for name in ("images", "group_ids"):
        with pytest.raises(ArgumentError, match=f"{name} has 0 entries"):
            to_samples(made, fixture.processor, **{name: []})
    samples = to_samples(made, fixture.processor)
    one = [torch.zeros(s.num_loss_tokens) for s in samples]
    for columns in (one[1:], [one[0][:1], *one[1:]]):
        with pytest.raises(ArgumentError, match=r"advantages has \d+ entries for"):
            from_samples(samples, {"advantages": columns})
    rewarded = copy.deepcopy(made)
    rewarded.rewards = torch.ones(len(made.sequences))
    rewarded.action_mask[0] = 0
    with pytest.raises(LayoutError, match=r"row 0 .*empty_response"):
        to_samples(rewarded, fixture.processor)
    fewer = [list(images) for images in fixture.images()]
    row = next(i for i, images in enumerate(fewer) if len(images) == 2)
    fewer[row].pop()
    with pytest.raises(LayoutError, match=rf"row {row} .*dropped_image"):
        to_samples(made, fixture.processor, images=fewer)
    sampled = copy.deepcopy(made)
    sampled.sequences[0, sampled.action_mask[0].nonzero()[1] + 1] = IMAGE_PAD
    assert "MM203" in {p.code for p in mp.validate(to_samples(sampled, fixture.processor))}
    sampled.attention_mask[0, 3] = 0
    with pytest.raises(ArgumentError, match="0 between tokens"):
        to_samples(sampled, fixture.processor)


def assert_same(a, b):
    """Two Experiences, bit for bit."""
    for field in fields(b):
        assert_equal(getattr(a, field.name), getattr(b, field.name), field.name)


def test_the_page_s_example(experience, fixture, buffer):
    page = "docs/adapters.md"
    [code] = [block for block in blocks(page) if "replay_buffer.append" in block[1]]
    names = {"experience": experience, "processor": fixture.processor, "replay_buffer": buffer}
    ran = run(page, names, [code])
    again = ran["to_samples"]([buffer[i] for i in range(len(buffer))], fixture.processor)
    assert mp.compare(ran["samples"], again).ok and len(again) == len(fixture.rows)
