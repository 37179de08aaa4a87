"""One medium's pixels as a file: 256 bytes of JSON (dtype, shape, checksum), then the values, row by row."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import mmap
import os
import re
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, BlobError, require

MAP_NORESERVE = 0x4000  # of Linux: pages count when they are written to
HEAD_BYTES = 256
VERSION = 2  # of what the values are; 1 had the channels of Gemma 4's patches first
KEY = re.compile(r"[0-9a-f]{64}")
WIDTHS = {"uint8": 1, "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # bytes by dtype


def check_key(key: Any, name: str) -> None:
    """Raise ArgumentError for what is no cache key; `name` begins it."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ArgumentError(
            f"{name}: {key!r:.60} is not a cache key. Fix: pass Medium.cache_key, 64 hexadecimal digits"
        )


def parts_of(key: str, pixels: Any) -> tuple[str, tuple[int, ...], np.ndarray]:
    """dtype's name, shape and bytes of pixels [patches, patch_dim]: an array, or a tensor (copied if on a device)."""
    if type(pixels).__module__.split(".")[0] == "torch":
        name = str(pixels.dtype).removeprefix("torch.")
        values = pixels.detach().cpu().contiguous()
        torch = require("torch", "torch", "mmpack.blobs")
        array = values.view(torch.uint8 if values.ndim else values.dtype).numpy()
        shape = tuple(values.shape)
    else:
        array = np.ascontiguousarray(pixels)
        name, shape = array.dtype.name, array.shape
    if name not in WIDTHS or len(shape) != 2:
        raise ArgumentError(
            f"mmpack.blobs: the pixels of {key:.16}… are {name} {list(shape)}. "
            f"Fix: pass [patches, patch_dim] of {', '.join(WIDTHS)}"
        )
    return name, shape, array.reshape(-1).view(np.uint8)


def head_of(key: str, name: str, shape: tuple[int, ...], body: np.ndarray) -> bytes:
    """HEAD_BYTES. The checksum is over the key, too: a file under another name is a damaged one."""
    fields = {"blob": VERSION, "dtype": name, "shape": shape, "crc32": checksum(key, body)}
    return json.dumps(fields).encode().ljust(HEAD_BYTES - 1) + b"\n"


def read_head(path: Path) -> tuple[str, tuple[int, ...]] | None:
    """dtype's name and shape, of a file of the right size; None if it is none. Raises OSError."""
    with path.open("rb") as file:
        fields = _fields(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)
    return None if fields is None else fields[:2]


def read_blob(path: Path, key: str) -> Any:
    """[patches, patch_dim] over the file's pages: an array, of bfloat16 a tensor.

    Raises: OSError; BlobError (MM502) for a file that is not as it was written.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole = mapped(file.fileno(), size)
    fields = _fields(whole[:HEAD_BYTES].tobytes(), size)
    body = whole[HEAD_BYTES:]
    if fields is None or checksum(key, body) != fields[2]:
        raise BlobError(
            f"mmpack.blobs: {str(path)[-80:]!a} is damaged: its bytes are not those that were written (MM502). "
            "Fix: put the medium again; a damaged file is overwritten",
            "MM502",
        )
    name, shape, _ = fields
    if name == "bfloat16":
        torch = require("torch", "torch", "mmpack.blobs: bfloat16 pixels")
        return torch.from_numpy(body).view(torch.bfloat16).reshape(shape)
    return body.view(name).reshape(shape)


def checksum(key: str, body: np.ndarray) -> int:
    """CRC-32 of a key and uint8 values."""
    return zlib.crc32(body.data, zlib.crc32(key.encode()))


def _fields(head: bytes, size: int) -> tuple[str, tuple[int, ...], int] | None:
    try:
        fields = json.loads(head)
        name, shape, checksum = fields["dtype"], tuple(fields["shape"]), fields["crc32"]
        right = len(shape) == 2 and all(type(n) is int and n >= 0 for n in shape)
        right = right and fields["blob"] == VERSION
        right = right and size == HEAD_BYTES + math.prod(shape) * WIDTHS[name]
    except (ValueError, KeyError, TypeError):
        return None
    return (name, shape, checksum) if right else None


def mapped(file: int, size: int) -> np.ndarray:
    """Return uint8 [size]: the file's pages, kept until the array is gone, even if the file is removed.

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
