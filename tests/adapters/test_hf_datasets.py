"""Hugging Face datasets: samples of rows, mapped whole and streamed, are those that the processor makes of each row."""

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("datasets")
import datasets
from support.same import assert_equal
from support.samples import full_sample

import mmpack as mp
from mmpack.adapters.arrow import PIXELS, arrow_schema, from_table, to_table
from mmpack.adapters.datasets import Samples, map_samples
from mmpack.adapters.process_rows import ProcessRows
from mmpack.adapters.torch import GroupedSteps, PackLoader
from mmpack.demo.qwen_processor import qwen_vl_processor


@pytest.fixture(scope="module")
def hf_processor():
    return qwen_vl_processor(max_pixels=16 * 28 * 28)


@pytest.fixture(scope="module")
def processor(hf_processor):
    return mp.wrap_processor(hf_processor, pixels="uint8")


def png(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Look."}]},
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "How many?"}],
                },
            ],
            "images": [png(i // 3)],
            "response_ids": rng.integers(0, 1000, 2 + i % 4).tolist(),
            "rollout_logprobs": (-rng.random(2 + i % 4, np.float32)).tolist(),
            "sample_id": f"s{i}",
            "group_id": f"g{i // 3}",
            "answer": f"{i}",
        }
        for i in range(9)
    ]


@pytest.fixture(scope="module")
def wanted(rows, processor):
    return [
        processor(
            row["messages"],
            row["response_ids"],
            media=row["images"],
            rollout_logprobs=row["rollout_logprobs"],
            sample_id=row["sample_id"],
            group_id=row["group_id"],
            metadata={"answer": row["answer"]},
        )
        for row in rows
    ]


def assert_samples(found, wanted):
    found, wanted = list(found), list(wanted)
    assert found == wanted
    for a, b in zip(found, wanted, strict=True):
        assert_equal(
            [np.asarray(m.pixel_values) for m in a.media], [m.pixel_values for m in b.media]
        )


def test_a_mapped_dataset(rows, wanted, processor, tmp_path):
    made = map_samples(datasets.Dataset.from_list(rows), processor, batch_size=4)
    samples = Samples(made)
    assert_samples(samples, wanted)
    assert len(samples) == 9 and samples[-1] == wanted[-1]
    made.to_parquet(tmp_path / "t.parquet")  # a trace, but for its column of pixels
    made.remove_columns(PIXELS).to_parquet(tmp_path / "trace.parquet")
    assert list(mp.read_trace(tmp_path / "trace.parquet")) == wanted
    loader = PackLoader(
        samples, groups=samples.groups, groups_per_step=2, max_tokens=400, share_prefix=True
    )
    packed = [b.sample_ids for step in loader for b in step]
    assert sorted(i for ids in packed for i in ids) == [f"s{i}" for i in range(9)]


def test_pictures_as_datasets_has_them(rows, wanted, processor):
    dataset = datasets.Dataset.from_list(rows).cast_column(
        "images", datasets.List(datasets.Image())
    )
    assert_samples(Samples(map_samples(dataset, processor)), wanted)


def test_a_stream_goes_on_where_it_was_cut(rows, wanted, processor):
    def loader():
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        samples = Samples(map_samples(stream, processor, batch_size=2))
        steps = GroupedSteps(samples, groups_per_step=1)
        return PackLoader(steps=steps, max_tokens=400, share_prefix=True, prefetch=1)

    whole = [(b.sample_ids, b.input_ids, b.pixel_values) for step in loader() for b in step]
    assert [ids for ids, _, _ in whole] == [[f"s{3 * g + k}" for k in range(3)] for g in range(3)]
    cut = loader()
    loop = (batch for step in cut for batch in step)
    next(loop)
    state = json.loads(json.dumps(cut.state_dict()))
    loop.close()
    again = loader()
    again.load_state_dict(state)
    assert_equal([(b.sample_ids, b.input_ids, b.pixel_values) for s in again for b in s], whole[1:])
    assert_equal([(b.sample_ids, b.input_ids, b.pixel_values) for s in again for b in s], whole)


def test_the_fingerprint_follows_from_settings_alone(rows, processor, hf_processor):
    function = ProcessRows(processor)
    before = function.fingerprint("rows")
    function(dict(zip(rows[0], zip(*(r.values() for r in rows[:2]), strict=True), strict=True)))
    assert len(processor.cache) and function.fingerprint("rows") == before
    copy = pickle.loads(pickle.dumps(function))
    assert copy.fingerprint("rows") == before and not len(copy.processor.cache)
    other = ProcessRows(mp.wrap_processor(hf_processor))
    assert len({before, other.fingerprint("rows"), function.fingerprint("others")}) == 3
    dataset = datasets.Dataset.from_list(rows[:2])
    prints = {map_samples(dataset, p)._fingerprint for p in (processor, copy)}
    assert len(prints) == 1


@pytest.mark.slow
def test_a_dataset_mapped_in_processes(rows, wanted, processor):
    dataset = datasets.Dataset.from_list(rows)
    assert_samples(Samples(map_samples(dataset, processor, num_proc=2)), wanted)


def test_a_table_holds_every_field():
    samples = [full_sample(f"s{i}", seed=i) for i in range(3)]
    for sample in samples:
        sample.metadata["nested"] = {"a": [1, 2.5, None, True]}
        for k, medium in enumerate(sample.media):
            medium.pixel_values = np.random.default_rng(k).random(
                (medium.num_patches, 8), np.float32
            )
    samples[1].media[0].pixel_values = None
    table = to_table(samples)
    assert table.schema.equals(arrow_schema()) and from_table(table) == samples
    again = from_table(table)
    for a, b in zip(again, samples, strict=True):
        for mine, theirs in zip(a.media, b.media, strict=True):
            assert_equal(mine.pixel_values, theirs.pixel_values)
    assert from_table(to_table(samples, pixels=False))[0].media[0].pixel_values is None
    assert from_table(to_table([])) == []


def test_what_is_refused(rows, processor):
    with pytest.raises(mp.ArgumentError, match="map_samples: dataset is of type list"):
        map_samples([], processor)
    with pytest.raises(mp.ArgumentError, match="ProcessRows: processor is"):
        map_samples(datasets.Dataset.from_list(rows), 3)
    with pytest.raises(mp.ArgumentError, match="a row has no messages"):
        ProcessRows(processor)({"sample_id": ["a"]})
    with pytest.raises(mp.ArgumentError, match="your own function reads") as caught:
        ProcessRows(processor, arguments=dict).fingerprint("rows")
    assert "\n" not in str(caught.value)
    wrong = dict(rows[0], response_ids=[-1])
    with pytest.raises(mp.ArgumentError, match=r"response_ids\[0\] is -1") as caught:
        ProcessRows(processor)({name: [value] for name, value in wrong.items()})
    assert caught.value.__notes__ == ["ProcessRows: in the row with sample_id 's0'"]
    with pytest.raises(mp.ArgumentError, match="Samples: a Dataset is read by index"):
        Samples(datasets.Dataset.from_list(rows)).state_dict()
    with pytest.raises(mp.ArgumentError, match="from_table: this is of type list"):
        from_table([])
