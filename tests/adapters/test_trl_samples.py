"""TRL's batches, padded, shuffled and split by TRL's own functions, as samples and back: nothing gets lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.same import assert_equal
from trl.trainer import utils

import mmpack as mp
from mmpack.adapters.loss_values import loss_columns
from mmpack.adapters.trl import from_batch, to_samples
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import get_family

FAMILY = get_family("qwen2_5_vl")
PAD, IMAGE = FAMILY.pad_token_id, FAMILY.image_token_id
GRIDS = [(1, 2, 2), (1, 4, 2), (1, 2, 6)]


@pytest.fixture(scope="module")
def processor():
    return qwen_vl_processor()


def batch_of(seed, *, pictures, tools, masked, scores, sequence_ratio, multiple, groups=False):
    """What GRPOTrainer returns, padded by TRL's own `pad`; two completions per prompt."""
    rng = np.random.default_rng(seed)
    torch_rng = torch.Generator().manual_seed(seed)

    def drawn_ids(low, high):
        return rng.integers(0, 1000, size=rng.integers(low, high)).tolist()

    prompts, completions, grids, pixels, counts = [], [], [], [], []
    for _ in range(int(rng.integers(1, 4))):
        ids, own = drawn_ids(1, 4), []
        for _ in range(int(rng.integers(0, 3)) if pictures else 0):
            grid = GRIDS[rng.integers(len(GRIDS))]
            own.append((grid, rng.standard_normal((np.prod(grid), FAMILY.patch_dim), np.float32)))
            ids += [
                FAMILY.vision_start_id,
                *[IMAGE] * FAMILY.vision_tokens(grid),
                FAMILY.vision_end_id,
            ]
        ids += drawn_ids(1, 4)
        for _ in range(2):
            prompts.append(ids)
            completions.append([*drawn_ids(1, 6), *([151645] if rng.random() < 0.5 else [])])
            grids += [g for g, _ in own]
            pixels += [torch.from_numpy(p) for _, p in own]
            counts.append(len(own))

    def padded(rows, value, side):
        rows = [torch.tensor(r) for r in rows]
        return utils.pad(rows, padding_value=value, padding_side=side, pad_to_multiple_of=multiple)

    ones = [[1] * len(c) for c in completions]
    out = {
        "prompt_ids": padded(prompts, PAD, "left"),
        "prompt_mask": padded([[1] * len(p) for p in prompts], 0, "left"),
        "completion_ids": padded(completions, PAD, "right"),
        "completion_mask": padded(ones, 0, "right"),
        "advantages": torch.randn(len(prompts), generator=torch_rng),
    }
    tool_mask = None
    if tools:
        tool_mask = padded([[1, *rng.integers(0, 2, len(c) - 1)] for c in completions], 1, "right")
    if masked:  # as mask_truncated_completions does it
        whole = torch.tensor([c[-1] == 151645 for c in completions]).unsqueeze(1).int()
        out["completion_mask"] = out["completion_mask"] * whole
        tool_mask = None if tool_mask is None else tool_mask * whole
    kept = out["completion_mask"] if tool_mask is None else out["completion_mask"] * tool_mask
    out["num_items_in_batch"] = kept.sum()
    shape = out["completion_ids"].shape
    if scores:
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            values = -torch.rand(shape, generator=torch_rng)
            out[name] = torch.where(out["completion_mask"] == 1, values, 0.0)
        sampled = [(-rng.random(len(c), np.float32)).tolist() for c in completions]
        if rng.random() < 0.3:
            sampled[0][0] = float("nan")  # a token that vLLM could not score
        out["sampling_per_token_logps"] = padded(sampled, 0.0, "right")
        gap = out["old_per_token_logps"] - out["sampling_per_token_logps"]
        gap = torch.nan_to_num(gap * kept)
        gap = gap.sum(dim=-1, keepdim=True) if sequence_ratio else gap
        out["importance_sampling_ratio"] = torch.exp(gap).clamp(max=3.0)
    if counts and sum(counts):
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        out |= {
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (ids == IMAGE).long(),
            "num_images": counts,
        }
    if tool_mask is not None:
        out["tool_mask"] = tool_mask
    if groups:  # as MmpackGRPO adds them in training
        out["mmpack_groups"] = torch.arange(len(prompts)) // 2
    return out


flags = st.fixed_dictionaries(
    dict.fromkeys(
        ["pictures", "tools", "masked", "scores", "sequence_ratio", "groups"], st.booleans()
    )
    | {"multiple": st.sampled_from([None, 4])}
)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), options=flags, share=st.booleans())
def test_nothing_is_lost(processor, tmp_path_factory, seed, options, share):
    outputs = batch_of(seed, **options)
    samples = to_samples(outputs, processor)
    mp.check(samples)
    batch = mp.pack(samples, share_prefix=share, loss_columns=loss_columns(samples))
    assert_equal(from_batch(batch, samples), outputs)

    # and through a file, which leaves pixels out
    file = tmp_path_factory.getbasetemp() / "trl.jsonl"
    mp.write_trace(file, samples)
    store = {m.cache_key: m.pixel_values for s in samples for m in s.media}
    read = list(mp.read_trace(file))
    batch = mp.pack(read, media=store, share_prefix=share)
    assert_equal(from_batch(batch, read), outputs)

    # and what `_prepare_inputs` makes of the batch; TRL indexes with torch's global generator
    torch.manual_seed(seed % 1000)
    shuffled = utils.shuffle_sequence_dict(utils.split_pixel_values_by_grid(outputs))
    for part in utils.split_tensor_dict(shuffled, 2):
        part = utils.unsplit_pixel_values_by_grid(part)
        samples = to_samples(part, processor)
        assert_equal(from_batch(mp.pack(samples, share_prefix=True), samples), part)


FULL = dict.fromkeys(["pictures", "tools", "scores"], True) | {
    "masked": False,
    "sequence_ratio": False,
    "multiple": None,
}


def test_what_a_sample_holds(processor):
    outputs = batch_of(5, **FULL)
    samples = to_samples(outputs, processor, sampling={"temperature": 0.7, "logprobs": "processed"})
    whole = {
        n: torch.cat([outputs[f"prompt_{n}"], outputs[f"completion_{n}"]], 1)
        for n in ("ids", "mask")
    }
    grids = []
    for b, s in enumerate(samples):
        assert s.input_ids.tolist() == whole["ids"][b][whole["mask"][b].bool()].tolist()
        kept = (outputs["completion_mask"] * outputs["tool_mask"])[b].bool()
        assert s.input_ids[s.loss_indices].tolist() == outputs["completion_ids"][b][kept].tolist()
        tools = (outputs["completion_mask"][b].bool() & ~kept).nonzero()[:, 0]
        observed = [t for o in s.observation_spans for t in range(o.start, o.stop)]
        assert observed == (tools + outputs["prompt_mask"][b].sum()).tolist()
        logprobs = outputs["sampling_per_token_logps"][b][kept]
        assert s.rollout_logprobs == pytest.approx(logprobs.numpy())
        grids += [list(s.media[span.media_index].grid_thw) for span in s.modality_spans]
        assert s.sampling["temperature"] == 0.7
        assert s.processor_fingerprint == mp.wrap_processor(processor).fingerprint
    assert grids == outputs["image_grid_thw"].tolist() != []
    # completions of one prompt are a group, and share their pictures
    assert [s.group_id for s in samples[::2]] == [s.group_id for s in samples[1::2]]
    batch = mp.pack(samples, share_prefix=True)
    assert len(batch.media) <= len(grids) // 2
    assert set(batch.loss_columns) == {"rollout_logprobs"}


def test_new_columns_win_over_recorded_ones(processor):
    outputs = batch_of(6, **FULL)
    samples = to_samples(outputs, processor)
    batch = mp.pack(samples)
    batch.loss_columns["old_logprobs"] = torch.arange(batch.num_loss_tokens).float()
    batch.loss_columns["advantages"] = -torch.arange(batch.num_loss_tokens).float()
    kept = (outputs["completion_mask"] * outputs["tool_mask"]).bool()
    back = from_batch(batch, samples)
    assert torch.equal(back["old_per_token_logps"][kept], torch.arange(kept.sum()).float())
    assert torch.equal(back["old_per_token_logps"][~kept], outputs["old_per_token_logps"][~kept])
    assert torch.equal(back["advantages"][kept], -torch.arange(kept.sum()).float())
    # a batch that TRL never saw: without samples a prompt ends where the loss begins
    outputs = batch_of(7, **FULL | {"tools": False, "scores": False})
    back = from_batch(mp.pack(to_samples(outputs, processor)))
    assert_equal(back, {k: outputs[k] for k in back})
    assert {"prompt_ids", "completion_ids", "pixel_values"} <= back.keys()


def test_pictures_give_the_names_that_every_adapter_gives(processor):
    image = Image.fromarray(np.arange(56 * 84 * 3, dtype=np.uint8).reshape(56, 84, 3))
    text = "<|vision_start|><|image_pad|><|vision_end|>?"
    made = processor(
        text=[text], images=[image], return_tensors="pt", return_mm_token_type_ids=True
    )
    outputs = {
        "prompt_ids": made["input_ids"],
        "prompt_mask": made["attention_mask"],
        "completion_ids": torch.tensor([[5, 6]]),
        "completion_mask": torch.ones(1, 2, dtype=torch.int64),
        "pixel_values": made["pixel_values"],
        "image_grid_thw": made["image_grid_thw"],
        "num_images": [1],
    }
    sample = to_samples(outputs, processor, images=[[image]])[0]
    own = mp.wrap_processor(processor).from_ids(
        sample.input_ids,
        [image],
        loss_spans=[(len(sample) - 2, len(sample))],
        sample_id=sample.sample_id,
        group_id=sample.group_id,
    )
    assert sample.media_cache_keys == own.media_cache_keys
    assert mp.compare([sample], [own], require=("input_ids", "media", "loss_spans")).ok


def test_a_field_that_is_none_is_absent(processor):
    outputs = batch_of(5, **FULL)
    left_out = ["sampling_per_token_logps", "tool_mask", "num_items_in_batch", "mm_token_type_ids"]
    rest = {k: v for k, v in outputs.items() if k not in left_out}
    assert len(rest) == len(outputs) - len(left_out)
    got, expected = (to_samples(x, processor) for x in (outputs | dict.fromkeys(left_out), rest))
    assert mp.compare(got, expected).ok
    assert [s.metadata for s in got] == [s.metadata for s in expected]
    assert all(s.rollout_logprobs is None and not s.observation_spans for s in got)


def test_contradictions_are_named(processor):
    outputs = batch_of(5, **FULL)
    without = {k: v for k, v in outputs.items() if k not in ("pixel_values", "image_grid_thw")}
    with pytest.raises(LayoutError, match=r"dropped_image.*MM104"):
        to_samples(without | {"num_images": None}, processor)
    sampled = outputs["completion_ids"].clone()
    sampled[0, 0] = IMAGE
    with pytest.raises(LayoutError, match="sampled_placeholder"):
        to_samples(outputs | {"completion_ids": sampled}, processor)
    shifted = outputs["mm_token_type_ids"].roll(1, dims=1)
    for types in (shifted, shifted[:, 1:]):
        with pytest.raises(LayoutError, match="chat_template"):
            to_samples(outputs | {"mm_token_type_ids": types}, processor)
    rows = len(outputs["prompt_ids"])
    for more, options, said in (
        ({"image_sizes": torch.ones(1)}, {}, "'image_sizes' is not a field"),
        ({"num_images": [9] * rows}, {}, "num_images counts"),
        ({"mmpack_videos": [[]] * rows}, {}, "the rows have videos"),
        ({}, {"images": [None] * (rows - 1)}, f"images has {rows - 1} entries for {rows} rows"),
        ({}, {"group_ids": ["g"] * (rows + 1)}, f"group_ids has {rows + 1} entries"),
    ):
        with pytest.raises(ArgumentError, match=said):
            to_samples(outputs | more, processor, **options)
    samples = to_samples(outputs, processor)
    with pytest.raises(ArgumentError, match="not those of the batch"):
        from_batch(mp.pack(samples), samples[::-1])
    other = to_samples(batch_of(8, **FULL), processor, group_ids=list("abcdefghi")[: len(samples)])
    both = samples + other
    with pytest.raises(ArgumentError, match="several of TRL's batches"):
        from_batch(mp.pack(both), both)
