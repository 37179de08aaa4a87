"""Bytes moved and memory held by a step's pictures: in verl's DataProto, as its tensors move, and by reference.

512 samples of 64 prompts, 8 responses each, with 4 pictures: 256 distinct ones, of 64 patches (112 × 112 pixels: real
ones are 10 to 100 times as large; all figures but keys and ids grow with them). Two rollout processes make the samples,
a driver joins them and deals them to two ranks, each by pickle through pipes. `pipes` is what went through them,
`store` what was written to it, `held` the proportional set size (PSS) of all processes when the ranks have their
samples, above what they took before, and the whole store. Both ways must give the ranks the same pixels, or nothing is
reported.

    .venv-verl/bin/python benchmarks/media_by_reference.py [--prompts 64] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import pickle
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import on_host

import mmpack as mp
from mmpack.blobs import SharedBlobs, take

RESPONSES, PICTURES, SIDE, TOKENS, MIB = 8, 4, 8, 64, 2**20
WAYS = ("DataProto", "reference float32", "reference uint8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--out", type=Path, default=on_host.RESULTS / "media_by_reference.json")
    args = parser.parse_args()
    rows = [measured(way, args.prompts) for way in WAYS]
    if len({row.pop("pixels") for row in rows}) != 1:
        raise SystemExit("the ranks' pixels differ between the ways: nothing is reported")
    print(f"{'':20}{'pipes MiB':>11}{'store MiB':>11}{'held MiB':>10}{'seconds':>9}")
    for row in rows:
        numbers = f"{row['pipes_mib']:11.1f}{row['store_mib']:11.1f}{row['held_mib']:10.1f}"
        print(f"{row['way']:20}{numbers}{row['seconds']:9.2f}")
    of_all = {"samples": args.prompts * RESPONSES, "pictures": args.prompts * PICTURES}
    packages = ("numpy", "torch", "tensordict", "verl")
    on_host.write(args.out, "media_by_reference", [of_all | row for row in rows], packages)


def measured(way: str, prompts: int) -> dict[str, Any]:
    """The driver: from two makers to two ranks."""
    context = multiprocessing.get_context("spawn")
    store = None if way == "DataProto" else SharedBlobs(2**30)
    half = prompts // 2
    work = [(maker, half * k, half * (k + 1)) for k in range(2)] + [(rank, 0, 0)] * 2
    ends, processes = [], []
    for run, *part in work:
        mine, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, way, store, *part), daemon=True)
        process.start()
        ends.append(mine)
        processes.append(process)
    for end in ends:
        end.recv()
    pids = ["self", *(str(p.pid) for p in processes)]
    before, started = pss(pids), time.perf_counter()
    for end in ends[:2]:
        end.send("make")
    parts = [end.recv_bytes() for end in ends[:2]]
    moved = sum(map(len, parts))
    dealt = joined(parts, way)
    del parts
    for k in range(2):
        data = pickle.dumps(dealt[k], protocol=5)
        moved += len(data)
        ends[2 + k].send_bytes(data)
        del data
    for end in ends[2:]:
        end.recv()
    seconds, held = time.perf_counter() - started, pss(pids) - before
    digests = []
    for end in ends[2:]:
        end.send("digest")
        digests.append(end.recv())
    written = 0
    for end in ends[:2]:
        end.send("end")
        written += end.recv()
    for process in processes:
        process.join()
    if store is not None:
        store.close()
    return {
        "way": way,
        "pipes_mib": moved / MIB,
        "store_mib": written / MIB,
        "held_mib": held / 1024 + written / MIB,
        "seconds": seconds,
        "pixels": tuple(digests),
    }


def pss(pids: list[str]) -> int:
    """KB of all processes together; shared pages count once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            total += int(line.split()[1]) if line.startswith("Pss:") else 0
    return total


def joined(parts: list[bytes], way: str) -> list[Any]:
    """What the makers sent, for each rank its half; verl's own concat and chunk."""
    made = [pickle.loads(part) for part in parts]
    if way == "DataProto":
        from verl import DataProto

        return DataProto.concat(made).chunk(2)
    samples = [s for part in made for s in part]
    return [samples[: len(samples) // 2], samples[len(samples) // 2 :]]


# the processes


def maker(end: Connection, way: str, store: Any, first: int, last: int) -> None:
    """A rollout worker: one sample per response, each with its own pixels, as verl's agent loops make them."""
    import torch

    if way == "DataProto":
        import verl  # noqa: F401
    torch.set_num_threads(1)
    end.send("ready")
    end.recv()
    samples = (sample(p, r, way) for p in range(first, last) for r in range(RESPONSES))
    made: Any = data_proto(list(samples)) if store is None else lean(samples, store)
    data = pickle.dumps(made, protocol=5)
    end.send_bytes(data)
    del made, data
    end.recv()
    end.send(0 if store is None else store.stats.bytes_written)


def rank(end: Connection, way: str, store: Any, *_: int) -> None:
    """A rank: it has its samples when it could make its first micro-batch."""
    import torch

    if way == "DataProto":
        import verl  # noqa: F401
    torch.set_num_threads(1)
    end.send("ready")
    mine = pickle.loads(end.recv_bytes())
    pixels = rows_of(mine, store, 0, 16)  # the first micro-batch: two prompts
    end.send("there")
    end.recv()
    digest = hashlib.sha256()
    for start in range(0, len(mine), 16):
        pixels = rows_of(mine, store, start, start + 16)
        digest.update(floats(pixels.numpy()).tobytes())
    end.send(digest.hexdigest())


def rows_of(mine: Any, store: Any, start: int, stop: int) -> Any:
    """Pixels of a micro-batch, each picture once."""
    import torch

    if store is not None:
        return mp.pack(mine[start:stop], media=store, share_prefix=True).pixel_values
    inputs = mine[start:stop].non_tensor_batch["multi_modal_inputs"]
    return torch.cat([x["pixel_values"] for x in inputs[::RESPONSES]])


def lean(samples: Any, store: SharedBlobs) -> list[mp.Sample]:
    return [s for one in samples for s in take([one], store)]


def sample(prompt: int, response: int, way: str) -> mp.Sample:
    media, ids, spans = [], [], []
    for k in range(PICTURES):
        name = f"{prompt}/{k}"
        key = hashlib.sha256(name.encode()).hexdigest()
        draw = np.random.default_rng(int(key[:8], 16))
        pixels = draw.integers(0, 256, (SIDE * SIDE, 1176), np.uint8)
        if way != "reference uint8":
            pixels = floats(pixels)
        grid = (1, SIDE, SIDE)
        media.append(mp.Medium(name, "image", key, grid, SIDE * SIDE // 4, pixel_values=pixels))
        start = len(ids) + 1
        ids += [151652, *[151655] * (SIDE * SIDE // 4), 151653]
        spans.append(mp.schema.ModalitySpan(start, len(ids) - 1, "image", k))
    answer = np.random.default_rng([prompt, response]).integers(0, 1000, TOKENS)
    loss = [mp.LossSpan(len(ids), len(ids) + TOKENS)]
    whole = np.concatenate([ids, answer])
    name, group = f"{prompt}/{response}", f"{prompt}"
    return mp.Sample(name, group, "qwen2_5_vl", whole, media, spans, loss)


def floats(pixels: np.ndarray) -> np.ndarray:
    """Bytes as a processor normalises them; floats as they are."""
    if pixels.dtype != np.uint8:
        return pixels
    return (pixels / np.float32(127.5)) - np.float32(1)


def data_proto(samples: list[mp.Sample]) -> Any:
    """As verl's agent loop lays samples out: ids padded to the longest, pixels of each sample in an object column."""
    import torch
    from verl import DataProto

    inputs = np.empty(len(samples), dtype=object)
    for i, s in enumerate(samples):
        inputs[i] = {
            "pixel_values": torch.from_numpy(np.concatenate([m.pixel_values for m in s.media])),
            "image_grid_thw": torch.tensor([m.grid_thw for m in s.media]),
        }
    ids = torch.stack([torch.from_numpy(s.input_ids) for s in samples])
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DataProto.from_dict(tensors=tensors, non_tensors={"multi_modal_inputs": inputs})


if __name__ == "__main__":
    main()
