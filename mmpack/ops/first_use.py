"""Kernels of Triton, FlashAttention-4 and torch: compiled on first use, cached on disk, and logged once.

A process on a machine that ran the same before loads all of it: Triton from TRITON_CACHE_DIR, torch from
TORCHINDUCTOR_CACHE_DIR, FlashAttention-4 from FLASH_ATTENTION_CUTE_DSL_CACHE_DIR.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmpack.progress import on_terminal

logger = logging.getLogger("mmpack")
QUIET = 2.0  # seconds without another kernel, after which the line on a terminal ends
FLASH_ATTN_4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_"  # how its variables begin
LOOK = 0.2  # seconds between two looks at torch's counters


def cache_folder() -> Path:
    """Where mmpack keeps what is compiled: XDG_CACHE_HOME/mmpack, else ~/.cache/mmpack."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmpack"


def flash_attn_4_interface() -> Any:
    """The package's `flash_attn.cute.interface`; its cache on disk, off by default, is switched on before it is loaded.

    Its own environment variables come first. Without effect where another imported the package before.
    """
    _keep_flash_attn_4()
    import flash_attn.cute.interface as interface  # type: ignore[import-not-found]

    return interface


@functools.cache
def _keep_flash_attn_4() -> None:
    folder = _flash_attn_4_folder()
    os.environ.setdefault(f"{FLASH_ATTN_4_CACHE}ENABLED", "1")
    os.environ.setdefault(f"{FLASH_ATTN_4_CACHE}DIR", str(folder))
    if not any(folder.rglob("*.o")):
        PROGRESS.say("FlashAttention-4's kernels")


def _flash_attn_4_folder() -> Path:
    given = os.environ.get(f"{FLASH_ATTN_4_CACHE}DIR")
    return cache_folder() / "flash_attn_4" if given is None else Path(given)


class Progress:
    """One line per process that says that something is compiled; on a terminal it counts on in place."""

    def __init__(self) -> None:
        self.count, self.seconds, self.said = 0, 0.0, False
        self.watched: set[str] = set()
        self.timer: threading.Timer | None = None

    def say(self, what: str) -> None:
        """Log once per process that `what` is being compiled."""
        if not self.said:
            self.said = True
            logger.warning(
                "compiling %s for %s; later processes load them from disk", what, _device()
            )

    def kernel(self, name: str, seconds: float) -> None:
        """Count a kernel that took `seconds` to compile."""
        self.count += 1
        self.seconds += seconds
        self.say("kernels")
        if on_terminal():
            line = f"mmpack: {self.count} kernels compiled in {self.seconds:.0f} s: {name}"
            _write(f"\r\x1b[2K{line:.100}")
            self._end_later()

    def _end_later(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(QUIET, _write, args=["\n"])
        self.timer.daemon = True
        self.timer.start()


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


PROGRESS = Progress()


@functools.cache
def watch_triton() -> None:
    """Let Triton tell `PROGRESS` what it compiles, next to a listener that it has already."""
    from triton import knobs

    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, times: Any, **more: Any) -> None:
        if not cache_hit:
            PROGRESS.kernel(getattr(src, "name", "a kernel"), times.total / 1e6)
        if before is not None:
            before(src=src, cache_hit=cache_hit, times=times, **more)

    knobs.compilation.listener = listen


@contextmanager
def watch_inductor(what: str) -> Iterator[None]:
    """Let `PROGRESS` say `what` as soon as torch compiles, within the block, a graph that its cache on disk lacks.

    Only the first block of a process for the same `what` is watched.
    """
    if PROGRESS.said or what in PROGRESS.watched:
        yield
        return
    PROGRESS.watched.add(what)
    before, over = _graphs_compiled(), threading.Event()

    def look() -> None:
        while not over.wait(LOOK) and not PROGRESS.said:
            if _graphs_compiled() > before:
                PROGRESS.say(what)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if _graphs_compiled() > before:
            PROGRESS.say(what)


def compiled_so_far() -> int:
    """Kernels of Triton (once it is watched) and FlashAttention-4, and torch's graphs: compiled here, not loaded."""
    return PROGRESS.count + sum(1 for _ in _flash_attn_4_folder().rglob("*.o")) + _graphs_compiled()


def _graphs_compiled() -> int:
    """How many graphs inductor compiled, and did not load, in this process."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return sum(counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "bypass"))


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "the CPU"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName)
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
