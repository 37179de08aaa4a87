"""The matrix's fixture (drawn problems, fixed responses and logprobs), which several frameworks' tests read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fixture() -> Any:
    from matrix.fixture import make_fixture

    return make_fixture()


@pytest.fixture
def processed(fixture: Any) -> Any:
    """The fixture's rows as mmpack's own processor makes them: samples that no framework has seen."""
    return [
        fixture.processor(fixture.messages[p], ids, sample_id=i, group_id=g, rollout_logprobs=lp)
        for (p, ids, lp), (i, g) in zip(fixture.rows, fixture.ids, strict=True)
    ]


@pytest.fixture(scope="session")
def verl_on_cpu() -> None:
    from conformance.verl_cpu import start

    start()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Ray on this node, with a small store; processors are counted, not used."""
    import ray

    store = 100 * 2**20
    ray.init(num_cpus=4, object_store_memory=store, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL. Larger weights, so that attention is far from uniform; fp32 still holds its bounds."""
    from support.models import small_model

    return _saved(small_model("qwen2_5_vl", factor=2), tmp_path_factory)


@pytest.fixture(scope="session")
def smallest_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models import smallest_qwen2_5_vl

    return _saved(smallest_qwen2_5_vl(), tmp_path_factory)


def _saved(model: Any, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("model")
    model.save_pretrained(folder)
    return folder
