"""What is compiled at first use: said once per process, counted on a terminal, kept on disk."""

import io
import logging
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from mmpack.ops import first_use
from mmpack.ops.first_use import Progress, flash_attn_4_interface, watch_inductor


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_it_is_said_once(caplog):
    progress = Progress()
    with caplog.at_level(logging.WARNING, "mmpack"):
        progress.kernel("first", 1.5)
        progress.kernel("second", 2.0)
        progress.say("FlexAttention")
    assert [r.getMessage().partition(" for ")[0] for r in caplog.records] == ["compiling kernels"]
    assert (progress.count, progress.seconds) == (2, 3.5)


def test_a_terminal_counts_on_in_place(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(first_use, "QUIET", 0.01)
    progress = Progress()
    progress.kernel("first", 1.0)
    progress.kernel("second", 2.0)
    progress.timer.join()
    lines = sys.stderr.getvalue().split("\r")
    assert "1 kernels compiled in 1 s: first" in lines[-2]
    assert "2 kernels compiled in 3 s: second\n" in lines[-1]


def test_triton_tells_what_it_compiles_and_other_listeners_hear_it_too(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **said: heard.append(said))
    monkeypatch.setattr(first_use, "PROGRESS", Progress())
    first_use.watch_triton.__wrapped__()
    for cache_hit in (True, False):
        knobs.compilation.listener(
            src=SimpleNamespace(name="kernel"),
            metadata={},
            metadata_group={},
            times=SimpleNamespace(total=2_000_000),
            cache_hit=cache_hit,
        )
    assert (first_use.PROGRESS.count, first_use.PROGRESS.seconds) == (1, 2.0)
    assert [sorted(said) for said in heard] == [
        ["cache_hit", "metadata", "metadata_group", "src", "times"]
    ] * 2


@pytest.mark.parametrize("own", [None, "elsewhere"])
def test_flash_attention_4_keeps_its_kernels(own, monkeypatch, tmp_path, caplog):
    variable = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    for name in (variable, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"):
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)
    if own is not None:
        monkeypatch.setenv(variable, str(tmp_path / own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(first_use, "PROGRESS", Progress())
    first_use._keep_flash_attn_4.cache_clear()
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    interface = flash_attn_4_interface()
    first_use._keep_flash_attn_4.cache_clear()
    assert interface is sys.modules["flash_attn.cute.interface"]
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    expected = tmp_path / (own or "mmpack/flash_attn_4")
    assert os.environ[variable] == str(expected)
    assert "FlashAttention-4" in caplog.text


def test_graphs_that_torch_compiles_are_said_and_those_it_loads_are_not(monkeypatch, caplog):
    from torch._dynamo.utils import counters

    progress = Progress()
    monkeypatch.setattr(first_use, "PROGRESS", progress)
    monkeypatch.setattr(first_use, "LOOK", 0.01)
    with watch_inductor("layers"):
        counters["inductor"]["fxgraph_cache_hit"] += 1
    assert not progress.said
    with watch_inductor("blocks"):
        counters["inductor"]["fxgraph_cache_miss"] += 1
        for _ in range(500):
            if progress.said:  # while it compiles, not after
                break
            time.sleep(0.01)
        assert progress.said
    assert [r.getMessage().partition(" for ")[0] for r in caplog.records] == ["compiling blocks"]


def test_what_was_compiled_is_counted_and_what_was_loaded_is_not(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_use, "PROGRESS", Progress())
    before = first_use.compiled_so_far()
    counters["inductor"]["fxgraph_cache_hit"] += 5
    assert first_use.compiled_so_far() == before
    counters["inductor"]["fxgraph_cache_miss"] += 1
    first_use.PROGRESS.kernel("a kernel", 0.1)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "a.o").touch()
    assert first_use.compiled_so_far() == before + 3
