"""Hugging Face datasets: samples of rows, mapped whole and streamed, are those that the processor makes of each row."""

import json
import pickle

import numpy as np
import pytest

pytest.importorskip("datasets")
import datasets
from support.data_rows import assert_samples, batches_of, problem_rows, samples_of_rows
from support.same import assert_equal
from support.samples import full_sample

import mmpack as mp
from mmpack.adapters.arrow import PIXELS, arrow_schema, from_table, to_table
from mmpack.adapters.datasets import Samples, map_samples
from mmpack.adapters.process_rows import ProcessRows
from mmpack.adapters.torch import GroupedSteps, PackLoader
from mmpack.demo.qwen_processor import qwen_vl_processor

ROWS = problem_rows(9)
HF_PROCESSOR = qwen_vl_processor(max_pixels=16 * 28 * 28)


@pytest.fixture(scope="module")
def processor():
    return mp.wrap_processor(HF_PROCESSOR, pixels="uint8")


@pytest.fixture(scope="module")
def wanted(processor):
    return samples_of_rows(ROWS, processor)


def test_a_mapped_dataset(wanted, processor, tmp_path):
    made = map_samples(datasets.Dataset.from_list(ROWS), processor, batch_size=4)
    samples = Samples(made)
    assert_samples(samples, wanted)
    assert len(samples) == 9 and samples[-1] == wanted[-1]
    made.remove_columns(PIXELS).to_parquet(tmp_path / "trace.parquet")
    assert list(mp.read_trace(tmp_path / "trace.parquet")) == wanted
    order = {"groups": samples.groups, "groups_per_step": 2}
    packed = batches_of(PackLoader(samples, max_tokens=400, share_prefix=True, **order))
    assert sorted(i for ids, *_ in packed for i in ids) == [f"s{i}" for i in range(9)]


def test_pictures_as_datasets_has_them(wanted, processor):
    pictures = datasets.List(datasets.Image())
    dataset = datasets.Dataset.from_list(ROWS).cast_column("images", pictures)
    assert_samples(Samples(map_samples(dataset, processor)), wanted)


def test_a_stream_goes_on_where_it_was_cut(processor):
    def loader():
        stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)
        samples = Samples(map_samples(stream, processor, batch_size=2))
        steps = GroupedSteps(samples, groups_per_step=1)
        return PackLoader(steps=steps, max_tokens=400, share_prefix=True)

    whole = batches_of(loader())
    assert [ids for ids, _, _ in whole] == [[f"s{3 * g + k}" for k in range(3)] for g in range(3)]
    cut = loader()
    loop = (batch for step in cut for batch in step)
    next(loop)
    state = json.loads(json.dumps(cut.state_dict()))
    loop.close()
    again = loader()
    again.load_state_dict(state)
    assert_equal(batches_of(again), whole[1:])
    assert_equal(batches_of(again), whole)


def test_the_fingerprint_follows_from_settings_alone(processor):
    function = ProcessRows(processor)
    before = function.fingerprint("rows")
    function({name: [row[name] for row in ROWS[:2]] for name in ROWS[0]})
    assert len(processor.cache) and function.fingerprint("rows") == before
    copy = pickle.loads(pickle.dumps(function))
    assert copy.fingerprint("rows") == before and not len(copy.processor.cache)
    other = ProcessRows(mp.wrap_processor(HF_PROCESSOR))
    assert len({before, other.fingerprint("rows"), function.fingerprint("others")}) == 3
    dataset = datasets.Dataset.from_list(ROWS[:2])
    assert len({map_samples(dataset, p)._fingerprint for p in (processor, copy)}) == 1


@pytest.mark.slow
def test_a_dataset_mapped_in_processes(wanted, processor):
    made = map_samples(datasets.Dataset.from_list(ROWS), processor, num_proc=2)
    assert_samples(Samples(made), wanted)


def test_a_table_holds_every_field():
    samples = [full_sample(f"s{i}", seed=i) for i in range(3)]
    rng = np.random.default_rng(0)
    for sample in samples:
        sample.metadata["nested"] = {"a": [1, 2.5, None, True]}
        for medium in sample.media:
            medium.pixel_values = rng.random((medium.num_patches, 8), np.float32)
    samples[1].media[0].pixel_values = None
    table = to_table(samples)
    assert table.schema.equals(arrow_schema())
    again = from_table(table)
    assert again == samples
    for a, b in zip(again, samples, strict=True):
        for mine, theirs in zip(a.media, b.media, strict=True):
            assert_equal(mine.pixel_values, theirs.pixel_values)
    assert from_table(to_table(samples, pixels=False))[0].media[0].pixel_values is None
    assert from_table(to_table([])) == []


def test_what_is_refused(processor):
    dataset = datasets.Dataset.from_list(ROWS)
    wrong = {name: [value] for name, value in (ROWS[0] | {"response_ids": [-1]}).items()}
    for call, said in (
        (lambda: map_samples([], processor), "map_samples: dataset is of type list"),
        (lambda: map_samples(dataset, 3), "ProcessRows: processor is"),
        (lambda: ProcessRows(processor)({"sample_id": ["a"]}), "a row has no messages"),
        (lambda: ProcessRows(processor, arguments=dict).fingerprint(""), "your own function"),
        (lambda: Samples(dataset).state_dict(), "Samples: a Dataset is read by index"),
        (lambda: from_table([]), "from_table: this is of type list"),
        (lambda: ProcessRows(processor)(wrong), r"response_ids\[0\] is -1"),
    ):
        with pytest.raises(mp.ArgumentError, match=said) as caught:
            call()
    assert caught.value.__notes__ == ["ProcessRows: in the row with sample_id 's0'"]
