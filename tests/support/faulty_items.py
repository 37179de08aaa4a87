"""A data set of samples some of which end their worker: numpy alone, since each worker imports it."""

import hashlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import mmpack as mp

COUNT = 24


def sample_of(i: int) -> mp.Sample:
    """A picture of 16 patches for four samples each."""
    key = hashlib.sha256(f"picture {i // 4}".encode()).hexdigest()
    pixels = np.random.default_rng(i // 4).random((16, 1176), np.float32)
    medium = mp.Medium(f"m{i // 4}", "image", key, (1, 4, 4), 4, pixel_values=pixels)
    ids = np.array([1, 151652, *[151655] * 4, 151653, 5 + i, 6])
    spans = [mp.schema.ModalitySpan(2, 6, "image", 0)]
    group = f"g{i // 4}"
    return mp.Sample(f"s{i}", group, "qwen2_5_vl", ids, [medium], spans, [mp.LossSpan(7, 9)])


class Faulty:
    """Items that do what `faults` say: their number -> the fault."""

    def __init__(self, faults: dict[int, str], folder: Path | None = None):
        self.faults, self.folder = faults, folder

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int):
        fault = self.faults.get(i)
        if self.folder is not None:
            with (self.folder / str(i)).open("a") as file:
                file.write(f"{os.getpid()}\n")
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "dies sending":
            Connection._send = _half_of_it
        if fault == "dies once" and not (self.folder / f"{i} died").exists():
            (self.folder / f"{i} died").touch()
            os._exit(3)
        if fault == "raises":
            raise ValueError(f"no item\n{i}")
        if fault == "gone":
            raise FileNotFoundError(2, "no such file")
        if fault == "can't be sent":
            return lambda: i
        return sample_of(i), {"advantages": float(i)}


def _half_of_it(pipe: Connection, bytes_: bytes) -> None:
    os.write(pipe.fileno(), bytes_[: len(bytes_) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


class NoPickle:
    """It is sent, and can't be read."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return i

    def __setstate__(self, state):
        raise RuntimeError("can't be unpickled")

    def __getstate__(self):
        return {"a": 1}
