"""Ray Data as it is, on one node: rows through an actor are the processor's samples, which plan and pack."""

import pytest

pytest.importorskip("ray")
import ray
from support.data_rows import assert_samples, batches_of, problem_rows, samples_of_rows
from support.same import assert_equal

import mmpack as mp
from mmpack.adapters.arrow import PIXELS
from mmpack.adapters.ray import map_samples, to_samples
from mmpack.adapters.torch import GroupedSteps, PackLoader
from mmpack.demo.qwen_processor import qwen_vl_processor

pytestmark = [pytest.mark.plane, pytest.mark.slow]


@pytest.fixture(autouse=True)
def in_order(ray_cluster):
    """Blocks in the order of their rows."""
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False


def test_rows_through_an_actor_plan_and_pack(tmp_path):
    processor = mp.wrap_processor(qwen_vl_processor(max_pixels=16 * 28 * 28))
    rows = problem_rows(12)
    wanted = samples_of_rows(rows, processor)
    made = map_samples(ray.data.from_items(rows), processor, batch_size=3).materialize()
    assert_samples(to_samples(made, batch_size=5), wanted)
    packed = []
    for given in (list(to_samples(made)), wanted):
        steps = GroupedSteps(given, groups_per_step=2)
        packed.append(batches_of(PackLoader(steps=steps, max_tokens=400, share_prefix=True)))
    assert_equal(*packed)
    made.drop_columns([PIXELS]).write_parquet(str(tmp_path / "traces"))
    read = [s for path in (tmp_path / "traces").glob("*.parquet") for s in mp.read_trace(path)]
    assert sorted(read, key=lambda s: int(s.sample_id[1:])) == wanted

    wrong = [rows[0], {**rows[1], "response_ids": [-1]}]
    made = map_samples(ray.data.from_items(wrong), processor, pixels=False)
    with pytest.raises(Exception, match=r"response_ids\[0\] is -1"):
        list(to_samples(made))
    with pytest.raises(mp.ArgumentError, match="map_samples: dataset is of type list"):
        map_samples([], processor)
    with pytest.raises(mp.ArgumentError, match="to_samples: dataset is None"):
        list(to_samples(None))
