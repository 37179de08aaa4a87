"""Settings of every test: offline, seeded, the same examples on every run; data beside the checkout."""

import os
import random
import sys
from pathlib import Path

# Before torch and transformers are imported. Parallel workers share the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile(
    "mmpack",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # says more about the machine than about the test
)
settings.load_profile("mmpack")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (for libraries that draw from the global state)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def geo3k_dir() -> Path:
    """Seven real problems of Geometry3K, which lie beside a checkout on some machines."""
    folder = ROOT.parent / "shared" / "geo3k"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder
