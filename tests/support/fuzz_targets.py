"""What `fuzz.py` tries: for each reader, damaged files without end, and a call that may refuse one in one line only.

What was read as a trace, a plan or a report is drawn, too.
"""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    """Bytes, and of JSON documents values in turn."""

    def files(seed: int, folder: Path) -> Iterator[bytes]:
        rng = random.Random(seed)
        whole = sources()
        documents = [json.loads(data) for data in whole if data[:1] == b"{"]
        while True:
            yield trace_fuzz.mutated_bytes(rng.choice(whole), rng)
            if documents:
                yield json.dumps(trace_fuzz.mutated_record(rng.choice(documents), rng)).encode()

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


def drawn(what: Any, **options: Any) -> bool:
    """True, after every kind of view of `what`."""
    from mmpack.view import html, png

    repr(what)
    refused(lambda: (html(what, **options), png(what, **options)), ArgumentError)
    return True


def read_trace(path: Path) -> bool:
    from mmpack.schema.trace import read_trace as reader

    if not trace_fuzz.read_all(path):
        return False
    return drawn(list(reader(path, max_record_bytes=2**20)))


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

    if refused(lambda: mp.Plan.load(path), PlanError):
        return drawn(mp.Plan.load(path))
    return refused(lambda: CostModel.load(path), PlanError)


def reports() -> list[bytes]:
    from support.drifts import planted, rollouts

    import mmpack as mp
    from mmpack.parity.drift_traces import trace_drift

    rng = np.random.default_rng(0)
    left = rollouts(rng, 12)
    for sample in left:
        sample.modality_spans = []
    right = copy.deepcopy(left)
    for sample, x in zip(right, planted(rng, left, "turns", 30, 1e-4), strict=True):
        sample.rollout_logprobs = np.minimum(x, 0).astype(np.float32)
    drift, left_out = trace_drift(left, right)
    right[3].input_ids[0] += 1
    document = mp.compare(left, right).to_dict()
    with_drift = document | {"drift": drift.to_dict() | {"left_out": left_out}}
    return [json.dumps(found).encode() for found in (document, with_drift)]


def read_report(path: Path) -> bool:
    from mmpack.parity.saved import read_report as read

    if not refused(lambda: read(path), ArgumentError):
        return False
    report, drift = read(path)
    return drawn(report, drift=drift)


TARGETS = {
    f"trace{suffix}": Target(
        suffix,
        lambda seed, folder, suffix=suffix: trace_fuzz.files(suffix, seed, folder),
        read_trace,
    )
    for suffix in (".jsonl", ".jsonl.zst", ".parquet")
} | {
    "picture": Target(".bin", damaged(pictures), read_picture),
    "clip": Target(".bin", damaged(clips), read_clip),
    "sound": Target(".bin", damaged(sounds), read_sound),
    "plan": Target(".json", damaged(plans), read_plan),
    "report": Target(".json", damaged(reports), read_report),
}
