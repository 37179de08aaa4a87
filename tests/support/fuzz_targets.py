"""What `fuzz.py` tries: for each reader, damaged files without end, and a call that may refuse one in one line only."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support import trace_fuzz
from support.samples import make_sample

from mmpack.errors import ArgumentError, AudioError, MmpackError, PlanError, VideoError


class Target(NamedTuple):
    """`files(seed, folder)` gives files; `read(path)` says whether one was read, and raises what it must not."""

    suffix: str
    files: Callable[[int, Path], Iterator[bytes]]
    read: Callable[[Path], bool]


def damaged(sources: Callable[[], list[bytes]]) -> Callable[[int, Path], Iterator[bytes]]:
    def files(seed: int, folder: Path) -> Iterator[bytes]:
        rng = random.Random(seed)
        whole = sources()
        while True:
            yield trace_fuzz.mutated_bytes(rng.choice(whole), rng)

    return files


def refused(call: Callable[[], object], error: type[MmpackError]) -> bool:
    """Whether `call` gave something; else it must raise `error`, of one line with a fix."""
    try:
        call()
    except error as said:
        message = str(said)
        assert "\n" not in message and "Fix: " in message and len(message) < 2000, message
        return False
    return True


def pictures() -> list[bytes]:
    from PIL import Image

    from mmpack.processors.images import IMAGE_FORMATS

    pixels = np.random.default_rng(0).integers(0, 256, (24, 33, 3), np.uint8)
    out = []
    for kind in IMAGE_FORMATS:
        for mode in ("RGB", "L"):
            file = io.BytesIO()
            Image.fromarray(pixels).convert(mode).save(file, kind)
            out.append(file.getvalue())
    return out


def read_picture(path: Path) -> bool:
    from mmpack.processors.images import rgb_pixels

    return refused(lambda: rgb_pixels(path.read_bytes(), None, "fuzz"), ArgumentError)


def clips() -> list[bytes]:
    from support.marked_clips import clip

    containers = ("mp4", "matroska", "avi", "mpegts", "flv")
    return [clip(8, container=container) for container in containers]


def read_clip(path: Path) -> bool:
    from mmpack.video import Limits, decode, probe

    limits = Limits(max_decoded_pixels=1 << 26, max_bytes=1 << 26)
    data = path.read_bytes()

    def both() -> None:
        info = probe(data, limits=limits)
        decode(data, [0, info.total_frames - 1], limits=limits)

    return refused(both, VideoError)


def sounds() -> list[bytes]:
    import soundfile

    wave = np.random.default_rng(0).standard_normal((400, 2)).astype(np.float32) / 8
    out = []
    for kind in ("WAV", "RF64", "FLAC", "OGG", "AIFF", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, wave, 16_000, format=kind)
        out.append(file.getvalue())
    return out


def read_sound(path: Path) -> bool:
    from mmpack.audio import decode

    return refused(lambda: decode(path.read_bytes()), AudioError)


def plans() -> list[bytes]:
    from tempfile import TemporaryDirectory

    import mmpack as mp
    from mmpack.planning import CostModel

    samples = [
        make_sample([("text", [1]), ("response", [2, 3])], sample_id=f"{i}") for i in range(3)
    ]
    with TemporaryDirectory() as folder:
        plan, cost = Path(folder) / "plan.json", Path(folder) / "cost.json"
        mp.plan(samples, max_tokens=99).save(plan)
        CostModel(1.0, 1e-6, 2.0).save(cost)
        nested = json.dumps({"a": [[[1] * 5] * 5] * 5}).encode()
        return [plan.read_bytes(), cost.read_bytes(), nested, b"[" * 100_000]


def read_plan(path: Path) -> bool:
    import mmpack as mp
    from mmpack.planning import CostModel

    whole = [
        refused(lambda load=load: load(path), PlanError) for load in (mp.Plan.load, CostModel.load)
    ]
    return any(whole)


TARGETS = {
    f"trace{suffix}": Target(
        suffix,
        lambda seed, folder, suffix=suffix: trace_fuzz.files(suffix, seed, folder),
        trace_fuzz.read_all,
    )
    for suffix in (".jsonl", ".jsonl.zst", ".parquet")
} | {
    "picture": Target(".bin", damaged(pictures), read_picture),
    "clip": Target(".bin", damaged(clips), read_clip),
    "sound": Target(".bin", damaged(sounds), read_sound),
    "plan": Target(".json", damaged(plans), read_plan),
}
