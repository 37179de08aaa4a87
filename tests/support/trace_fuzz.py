"""Feeds a trace reader with broken files: `python trace_fuzz.py SUFFIX COUNT SEED FOLDER`.

Run as a process with bounded address space, it ends with 0 only if every file gave samples or a
TraceError of one line. Prints how many were read and how many refused.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import TraceError
from mmpack.parity.compare import compare
from mmpack.schema.jsonl import dump_json
from mmpack.schema.rules import validate
from mmpack.schema.sample import Sample
from mmpack.schema.trace import read_trace, write_trace

ADDRESS_SPACE = 6 * 2**30
TOKENS = [
    *(b"NaN", b"-Infinity", b"1e999", b"1" + b"0" * 5000, b"null", b"true", b"[", b"{", b"]", b"}"),
    *(b'"', b",", b":", b"\n", b"\\ud800", b"\\", b"\xff", b"\0", b"[" * 3000, b"-1", b"1.5", b" "),
]
VALUES: list[Any] = [None, True, -1, 0, 2**31, 2**40, 2**63, 2**64, 10**300, 1.5, -1e308]
VALUES += [float("nan"), float("inf"), "", "x" * 1000, "\ud800", "line\nbreak", [], {}, [[]]]
VALUES += [[1, [2]], [None], {"turn": 1}, [1, 2], [""], {"span": [0, 2**31 - 1]}]
VALUES += [[{"start": 5, "stop": 1}], "sequence", "image", "video", [[1, 2], [3]]]


def sources() -> list[Sample]:
    from support.samples import full_sample, make_sample

    parts = [("text", [1]), ("image", (1, 2, 2)), ("response", [2, 3])]
    return [full_sample(), make_sample(parts, sample_id="s1"), make_sample([("text", [4])], "s2")]


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice((0, 255, 127, 128, rng.randrange(256)))
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 20))]
        elif kind == 3:
            out[at:at] = rng.choice(TOKENS)
        elif kind == 4:
            out[at : at + rng.randrange(10)] = rng.choice(TOKENS)
        elif kind == 5:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + rng.randrange(200)]
        else:
            del out[at:]
    return bytes(out)


def mutated_record(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    record = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 2))):
        holder: Any = record
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = rng.choice(keys)
            inner = holder[key]
            if not (isinstance(inner, (dict, list)) and inner and rng.random() < 0.7):
                break
            holder = inner
        action = rng.randrange(4)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.insert(key, holder[key])
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        if not record:
            break
    return record


def files(suffix: str, seed: int, folder: Path) -> Iterator[bytes]:
    """Broken files without end: for JSON Lines bytes, records and noise in turn; else bytes."""
    rng = random.Random(seed)
    paths = [folder / f"source{i}{suffix}" for i in range(2)]
    write_trace(paths[0], sources())
    write_trace(paths[1], sources()[1:])
    data = [p.read_bytes() for p in paths]
    if suffix == ".parquet":  # without checksums, so that broken pages reach the decoder
        import pyarrow.parquet as pq

        table = pq.read_table(paths[0])
        for compression, version in (("none", "1.0"), ("snappy", "2.0"), ("none", "2.0")):
            pq.write_table(table, paths[1], compression=compression, data_page_version=version)
            data.append(paths[1].read_bytes())
    records = [json.loads(dump_json(s.to_dict(numpy=True))) for s in sources()]
    while True:
        yield mutated_bytes(rng.choice(data), rng)
        if suffix == ".jsonl":
            record = mutated_record(rng.choice(records), rng)
            yield json.dumps(record).encode()
            if rng.random() < 0.2:
                yield rng.randbytes(rng.randrange(300))


def read_all(path: Path) -> bool:
    """Whether the file was read; what was read must be fit to be written and read again."""
    try:
        samples = list(read_trace(path, max_record_bytes=2**20))
    except TraceError as error:
        message = str(error)
        assert "\n" not in message and "(MM0" in message and len(message) < 1000, message
        if path.suffix == ".parquet":
            assert message == by_columns(path)
        return False
    if path.suffix == ".parquet":
        assert compare(samples, samples).to_json() == by_columns(path)
    for sample in samples:
        assert sample == Sample.from_dict(
            json.loads(dump_json(sample.to_dict(numpy=True))), "again"
        )
        for problem in validate(sample):
            assert "\n" not in str(problem)
    return True


def by_columns(path: Path) -> str:
    """The report of comparing a Parquet trace with itself, or the error."""
    readers = [read_trace(path, max_record_bytes=2**20) for _ in range(2)]
    try:
        return compare(*readers).to_json()
    except TraceError as error:
        return str(error)


def fuzz(suffix: str, count: int, seed: int, folder: Path) -> tuple[int, int]:
    """(files read, files refused). Raises whatever a reader must not raise."""
    path = folder / f"fuzz{suffix}"
    outcomes = [0, 0]
    for _, data in zip(range(count), files(suffix, seed, folder), strict=False):
        path.write_bytes(data)
        outcomes[not read_all(path)] += 1
    return outcomes[0], outcomes[1]


def peak_mib() -> float:
    """Peak memory of this process; `ru_maxrss` would count the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    suffix, count, seed, folder = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    np.seterr(all="raise", under="ignore")  # as numpy itself does
    read, refused = fuzz(suffix, int(count), int(seed), Path(folder))
    print(json.dumps({"read": read, "refused": refused, "peak_mib": peak_mib()}))


if __name__ == "__main__":
    main()
