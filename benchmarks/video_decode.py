"""Decoding 32 of 300 frames: mmpack against decord, PyAV and torchcodec used straight, and against decoding everything.

H.264 of moving noise, 30 frames a second, keyframes every 250 frames (FFmpeg's default) or every 30. Calls run in turn,
to and fro, with two threads each; a figure is the median, over the rounds, of the ratio of CPU seconds of the process.
No GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import decord
import numpy as np
import on_host
from torchcodec.decoders import VideoDecoder

from mmpack.video import decode

TOTAL, THREADS = 300, 2
FRAMES = np.linspace(0, TOTAL - 1, 32).round().astype(int).tolist()
SIZES = {"360p": (640, 360), "1080p": (1920, 1080)}
GOPS = (250, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=on_host.RESULTS / "video_decode.json")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            for gop in GOPS:
                path = str(Path(folder) / f"{name}-{gop}.mp4")
                encode(path, size, gop)
                rows += measured(path, {"clip": name, "keyframe_every": gop}, args.rounds)
    on_host.write(args.out, "video_decode", rows, ("av", "decord", "torchcodec"))
    for row in rows:
        print(json.dumps(row))


def measured(path: str, clip: dict, rounds: int) -> list[dict]:
    """One row a library. All give the same bytes, or nothing is measured."""
    straight = {"pyav": by_pyav, "decord": by_decord, "torchcodec": by_torchcodec}
    calls: dict[str, Callable[[], object]] = {"everything": lambda: by_pyav(path, range(TOTAL))}
    for name, call in straight.items():
        calls[name] = lambda call=call: call(path, FRAMES)
        calls[f"mmpack {name}"] = lambda name=name: decode(
            path, FRAMES, backend=name, threads=THREADS
        )
    want = by_pyav(path, FRAMES)
    if not all(
        np.array_equal(call(), want) for name, call in calls.items() if name != "everything"
    ):
        sys.exit("the frames differ, nothing is measured")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            start = time.process_time()
            calls[name]()
            seconds[name].append(time.process_time() - start)

    def ratio(name: str, other: str) -> float:
        pairs = zip(seconds[name], seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return [
        clip
        | {
            "library": name,
            "same_backend_over_straight": ratio(f"mmpack {name}", name),
            "auto_over_straight": ratio("mmpack pyav", name),
            "auto_over_everything": ratio("mmpack pyav", "everything"),
        }
        for name in straight
    ]


def by_pyav(path: str, frames) -> np.ndarray:
    """Decode on to the last frame, and convert those that are wanted."""
    wanted, out = set(frames), []
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.thread_count = "AUTO", THREADS
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                out.append(frame.to_ndarray(format="rgb24"))
            if len(out) == len(wanted):
                return np.stack(out)
    raise AssertionError("too few frames")


def by_decord(path: str, frames) -> np.ndarray:
    return decord.VideoReader(path, num_threads=THREADS).get_batch(frames).asnumpy()


def by_torchcodec(path: str, frames) -> np.ndarray:
    decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=THREADS)
    return decoder.get_frames_at(frames).data.numpy()


def encode(path: str, size: tuple[int, int], gop: int) -> None:
    """Smooth noise that drifts, under grain that moves faster."""
    width, height = size
    rng = np.random.default_rng(0)
    waves = np.fft.irfft2(
        np.fft.rfft2(rng.standard_normal((3, height, width)))
        * np.exp(-800 * (np.fft.fftfreq(height)[:, None] ** 2 + np.fft.rfftfreq(width)[None] ** 2)),
        (height, width),
    )
    picture = (200 * (waves - waves.min()) / np.ptp(waves) + 20).transpose(1, 2, 0).astype(np.uint8)
    grain = rng.integers(0, 9, (height, width, 1), np.uint8)
    with av.open(path, "w") as out:
        options = {"preset": "veryfast", "g": str(gop), "bf": "3", "b-pyramid": "normal"}
        stream = out.add_stream("libx264", rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for n in range(TOTAL):
            pixels = np.roll(picture, (n, 2 * n), (0, 1)) + np.roll(grain, 7 * n, 1)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())


if __name__ == "__main__":
    main()
