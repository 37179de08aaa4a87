"""One episode, laid out as a producer lays it out, and what each side of a pair may do to it.

Two turns: system text, a picture, a question, a response, a tool's answer with a screenshot, a second response.
"""

from __future__ import annotations

import base64
import copy
from typing import Any

import numpy as np
from support.samples import make_sample

import mmpack as mp
from mmpack.layout.fingerprint import fingerprint, response_hash
from mmpack.schema.sample import RESPONSE_TEXT_KEY

IMAGE, VIDEO, START, END = 151655, 151656, 151644, 151645
WORDS = {700: "ab", 701: "a", 702: "b", 703: "c", 704: "bc"}  # "abc" is 700 703, or 701 704
PROCESSOR: dict[str, Any] = {
    "tokenizer": {
        "vocab_sha256": "ab" * 32,
        "special_ids": {
            "<|im_start|>": START,
            "<|im_end|>": END,
            "<|image_pad|>": IMAGE,
            "<think>": 151667,
            "</think>": 151668,
        },
    },
    "chat_template": "sha256:" + "1" * 64,
    "image": {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "merge_size": 2},
    "video": {"min_pixels": 3136, "max_pixels": 602112, "patch_size": 14, "merge_size": 2},
    "position_rule": "grid",
    "tokens_per_second": 2.0,
}


THINK, THOUGHT = 151667, 151668


def look(seed: int = 0, turned: int = 1) -> str:
    """A thumbnail as it is recorded; `turned`: of the picture upright, by EXIF orientation 6."""
    cells = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    cells = np.rot90(cells, -1) if turned == 6 else cells
    return base64.b64encode(cells.tobytes()).decode()


def decode(ids: Any) -> str:
    return " ".join(WORDS.get(int(i), f"<{i}>") for i in ids).replace(" ", "")


def episode(
    system: Any = (11, 12, 13),
    grid: tuple[int, int, int] = (1, 8, 6),
    shot: tuple[int, int, int] = (1, 4, 4),
    response: Any = (700, 703, END),
    second: Any = (710, 711, 712, END),
    tool: Any = (31, 32, 33),
    asked: Any = (21, 22, 23, 24),
    rule: str = "grid",
    sample_id: str = "s0",
    video: tuple[int, int, int] | None = None,
    processor: dict[str, Any] | None = None,
) -> mp.Sample:
    """The episode, every optional field that parity reads recorded."""
    parts = [
        ("text", system),
        ("image", grid, "diagram") if video is None else ("video", video, "clip"),
        ("text", asked),
        ("response", response, 0),
        ("observation", tool, 0),
        ("image", shot, "screen"),
        ("text", (41, 42)),
        ("response", second, 1),
    ]
    sample = make_sample(parts, sample_id=sample_id, finish_reason="stop")
    for medium in sample.media:
        medium.size = (640, 480)
        medium.decoded_size, medium.mode, medium.file_hash = (640, 480), "RGB", "f" * 64
        if medium.modality == "video":
            medium.fps, medium.total_frames = 25.0, 100
            medium.frame_indices = np.arange(2 * medium.grid_thw[0]) * 5
            medium.frame_timestamps = tuple((medium.frame_indices / 25.0).tolist())
            medium.second_per_grid_ts = 0.4
    sample.processor = copy.deepcopy(PROCESSOR if processor is None else processor)
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    return finish(sample, rule)


def finish(sample: mp.Sample, rule: str = "grid", **keywords: Any) -> mp.Sample:
    """Positions, fingerprint and text hash as the producer would compute them from what the sample now holds."""
    written = sample.input_ids[sample.loss_indices]
    sample.metadata[RESPONSE_TEXT_KEY] = response_hash(decode(written), written)
    sample.processor_fingerprint = fingerprint(sample.processor)
    if IMAGE in sample.input_ids[sample.loss_indices]:
        return sample  # such ids have no positions
    grids: dict[str, list[Any]] = {"image": [], "video": []}
    seconds = []
    for span in sample.modality_spans:
        if span.frame:
            continue  # of a video that its first span stands for
        medium = sample.media[span.media_index]
        grids[span.modality].append(medium.grid_thw)
        if span.modality == "video":
            seconds.append(medium.second_per_grid_ts)
    sample.position_ids, _ = mp.mrope_positions(
        sample.input_ids,
        sample.family,
        image_grid_thw=grids["image"],
        video_grid_thw=grids["video"],
        **{"second_per_grid_ts": seconds or None, **keywords},
        rule=rule,
    )
    return sample


def other(sample: mp.Sample, **fields: Any) -> mp.Sample:
    """A copy with `fields` set as they are."""
    out = copy.deepcopy(sample)
    for name, value in fields.items():
        setattr(out, name, value)
    return out


def settings(**parts: dict[str, Any] | Any) -> dict[str, Any]:
    """PROCESSOR with some settings of its parts changed."""
    out = copy.deepcopy(PROCESSOR)
    for name, value in parts.items():
        out[name] = {**out[name], **value} if isinstance(value, dict) else value
    return out
