"""A file as memory: a numpy array over its pages, without a copy and without an open file."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import numpy as np

MAP_NORESERVE = 0x4000  # of Linux: pages count when they are written to


def mapped(file: int, size: int) -> np.ndarray:
    """uint8 [size]: the file's pages, kept until the array is gone, even if the file is removed.

    Whoever writes into the array gets pages of its own; the file stays as it was. Python's mmap would keep a file
    open for each array, and a step has more media than a process may have open files. Raises OSError.
    """
    if not size:
        return np.empty(0, np.uint8)
    system = _system()
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    at = system.mmap(None, size, protection, mmap.MAP_PRIVATE | MAP_NORESERVE, file, 0)
    if at == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    held = (ctypes.c_uint8 * size).from_address(at)
    end = weakref.finalize(held, system.munmap, at, size)
    end.atexit = False  # the process's end unmaps, and arrays may live until then
    return np.frombuffer(memoryview(held), np.uint8)


@functools.cache
def _system() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return system
