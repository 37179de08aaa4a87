"""Ray Data as it is, on one node: rows through an actor are the processor's samples, which plan and pack."""

import io

import numpy as np
import pytest

pytest.importorskip("ray")
import ray
from PIL import Image
from support.same import assert_equal

import mmpack as mp
from mmpack.adapters.arrow import PIXELS
from mmpack.adapters.ray import map_samples, to_samples
from mmpack.adapters.torch import GroupedSteps, PackLoader
from mmpack.demo.qwen_processor import qwen_vl_processor

pytestmark = [pytest.mark.plane, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two processors and a small store; blocks in the order of their rows."""
    ray.init(
        num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False
    )
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def processor():
    return mp.wrap_processor(qwen_vl_processor(max_pixels=16 * 28 * 28))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    files = []
    for _ in range(4):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(file, "png")
        files.append(file.getvalue())
    part = {"type": "image", "text": None}, {"type": "text", "text": "How many?"}
    return [
        {
            "messages": [{"role": "user", "content": list(part)}],
            "images": [files[i // 3]],
            "response_ids": rng.integers(0, 1000, 2 + i % 4).tolist(),
            "sample_id": f"s{i}",
            "group_id": f"g{i // 3}",
            "answer": str(i),
        }
        for i in range(12)
    ]


def test_rows_through_an_actor_plan_and_pack(rows, processor, tmp_path):
    wanted = [
        processor(
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "How many?"}],
                }
            ],
            row["response_ids"],
            media=row["images"],
            sample_id=row["sample_id"],
            group_id=row["group_id"],
            metadata={"answer": row["answer"]},
        )
        for row in rows
    ]
    made = map_samples(ray.data.from_items(rows), processor, batch_size=3).materialize()
    samples = list(to_samples(made, batch_size=5))
    assert samples == wanted
    for a, b in zip(samples, wanted, strict=True):
        assert_equal(a.media[0].pixel_values, b.media[0].pixel_values)

    def packed(given):
        steps = GroupedSteps(given, groups_per_step=2)
        loader = PackLoader(steps=steps, max_tokens=400, share_prefix=True, prefetch=1)
        return [(b.sample_ids, b.input_ids, b.pixel_values) for step in loader for b in step]

    assert_equal(packed(list(to_samples(made))), packed(wanted))
    made.drop_columns([PIXELS]).write_parquet(str(tmp_path / "traces"))
    read = [s for path in (tmp_path / "traces").glob("*.parquet") for s in mp.read_trace(path)]
    assert sorted(read, key=lambda s: int(s.sample_id[1:])) == wanted


def test_an_error_names_its_row(rows, processor):
    wrong = [rows[0], {**rows[1], "response_ids": [-1]}]
    made = map_samples(ray.data.from_items(wrong), processor, pixels=False)
    with pytest.raises(Exception, match=r"response_ids\[0\] is -1"):
        list(to_samples(made))


def test_what_is_refused(processor):
    with pytest.raises(mp.ArgumentError, match="map_samples: dataset is of type list"):
        map_samples([], processor)
    with pytest.raises(mp.ArgumentError, match="to_samples: dataset is None"):
        list(to_samples(None))
