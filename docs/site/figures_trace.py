"""Figures of what is recorded: a sample, its spans, parity, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svg import COLOURS, PALE, Drawing

import mmpack as mp

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = 151655  # <|image_pad|>
KEYS = tuple(f"sha256:{digit * 64}" for digit in "ab")


def sample(name: str, ids: list[int], **fields: Any) -> mp.Sample:
    """A sample of Qwen2.5-VL, valid, whose runs of placeholders are 4 × 4 patches: 4 tokens."""
    runs = [k for k, i in enumerate(ids) if i == PLACEHOLDER and (k == 0 or ids[k - 1] != i)]
    pictures = fields.pop("pictures", list(range(len(runs))))
    seen = list(dict.fromkeys(pictures))
    media = [
        {
            "media_id": f"picture {p}",
            "modality": "image",
            "cache_key": KEYS[p],
            "grid_thw": [1, 4, 4],
        }
        | {"num_tokens": 4}
        for p in seen
    ]
    spans = [
        {"start": k, "stop": k + 4, "modality": "image", "media_index": seen.index(p)}
        for k, p in zip(runs, pictures, strict=True)
    ]
    made = mp.Sample.from_dict(
        {"schema_version": "2", "sample_id": name, "group_id": "q", "family": "qwen2_5_vl"}
        | {"input_ids": ids, "media": media, "modality_spans": spans}
        | fields
    )
    mp.check([made])
    return made


def trace() -> str:
    words = ["▢", "▢", "▢", "▢", "How", "many", "?", "three", ".", "EOS"]
    ids = [PLACEHOLDER] * 4 + [4340, 1657, 30, 27856, 13, 151645]
    made = sample(
        "s0",
        ids,
        loss_spans=[{"start": 7, "stop": 10, "kind": "response"}],
        rollout_logprobs=[-0.22, -1.05, -0.03],
    )
    (span,), (loss,) = made.modality_spans, made.loss_spans
    medium = made.media[span.media_index]
    draw = Drawing(860, 330, "One sample of a trace: ids, media, spans and logprobs")
    draw.text(20, 30, "sample_id s0 · group_id q · family qwen2_5_vl", bold=True)
    x, y, w = 190, 150, 62
    draw.box(
        x,
        58,
        250,
        46,
        "image",
        f"media[0]: grid_thw {list(medium.grid_thw)}, {medium.num_tokens} tokens\ncache_key: what, and how it is cut",
        size=12,
    )
    draw.line((x + 125, 104), (x + 2 * w, y - 20), arrow=True)
    for k, name in enumerate(["token", "input_ids"]):
        draw.text(20, y + 20 + 30 * k, name, size=13, code=k == 1, colour=PALE)
    kinds = ["image"] * 4 + ["text"] * 3 + ["loss"] * 3
    draw.numbers(x, y - 5, list(range(len(ids))), w)
    draw.strip(x, y, list(zip(words, kinds, strict=True)), w)
    draw.numbers(x, y + 50, ids, w)
    draw.text(20, y + 93, "modality_spans", size=13, code=True, colour=PALE)
    draw.bracket(
        x + span.start * w,
        x + span.stop * w,
        y + 68,
        f"[{span.start}, {span.stop}) is media[{span.media_index}]",
        "image",
    )
    draw.text(20, y + 125, "loss_spans", size=13, code=True, colour=PALE)
    draw.bracket(
        x + loss.start * w,
        x + loss.stop * w,
        y + 100,
        f"[{loss.start}, {loss.stop}) {loss.kind}",
        "loss",
    )
    draw.text(20, y + 157, "rollout_logprobs", size=13, code=True, colour=PALE)
    draw.numbers(
        x + loss.start * w,
        y + 157,
        [f"{v:.2f}" for v in made.rollout_logprobs],
        w,
        COLOURS["loss"][1],
    )
    return draw.svg()


def spans() -> str:
    words = [
        "go",
        "▢",
        "▢",
        "▢",
        "▢",
        "I",
        "see",
        "click",
        "EOS",
        "▢",
        "▢",
        "▢",
        "▢",
        "done",
        "EOS",
    ]
    P = PLACEHOLDER
    made = sample(
        "s0",
        [3346, P, P, P, P, 40, 1490, 4205, 151645, P, P, P, P, 10438, 151645],
        loss_spans=[
            {"start": 5, "stop": 7, "kind": "reasoning", "turn": 0},
            {"start": 7, "stop": 9, "kind": "action", "turn": 0},
            {"start": 13, "stop": 15, "kind": "response", "turn": 1},
        ],
        observation_spans=[
            {"start": 1, "stop": 5, "source": "screenshot", "turn": 0},
            {"start": 9, "stop": 13, "source": "screenshot", "turn": 1},
        ],
    )
    kinds = ["text"] * len(words)
    for span in made.modality_spans:
        kinds[span.start : span.stop] = ["image" if span.media_index == 0 else "image2"] * 4
    for span in made.loss_spans:
        kinds[span.start : span.stop] = ["loss" if span.turn == 0 else "loss2"] * (
            span.stop - span.start
        )
    draw = Drawing(860, 340, "Spans of a conversation with two screenshots and two turns")
    draw.text(
        20,
        30,
        "Spans are half-open: [start, stop), in ids that are expanded and not padded",
        bold=True,
    )
    x, y, w = 170, 80, 45
    draw.text(20, y + 20, "input_ids", size=13, code=True, colour=PALE)
    draw.numbers(x, y - 6, list(range(len(words))), w)
    draw.strip(x, y, list(zip(words, kinds, strict=True)), w)
    rows: list[tuple[str, list[tuple[Any, str, str]]]] = [
        (
            "modality_spans",
            [
                (s, f"media[{s.media_index}]", ("image", "image2")[s.media_index])
                for s in made.modality_spans
            ],
        ),
        (
            "observation_spans",
            [(s, f"{s.source}, turn {s.turn}", "text") for s in made.observation_spans],
        ),
        ("loss_spans", [(s, s.kind, "loss" if s.turn == 0 else "loss2") for s in made.loss_spans]),
    ]
    for k, (name, row) in enumerate(rows):
        top = y + 46 + 48 * k
        draw.text(20, top + 14, name, size=13, code=True, colour=PALE)
        for span, text, kind in row:
            draw.bracket(x + span.start * w, x + span.stop * w, top, text, kind)
    draw.text(
        20,
        290,
        "The loss reads loss_spans and nothing else: no placeholder and no observation is in one.",
        size=13,
    )
    turns = ", ".join(str(s.turn) for s in made.loss_spans)
    draw.text(
        20,
        314,
        f"Each span has its turn ({turns}), so that a reward of turn 1 reaches the tokens of turn 1.",
        size=13,
    )
    return draw.svg()


def parity() -> str:
    folder = ROOT / "fixtures" / "causes" / "max_pixels"
    sides = {
        side: next(iter(mp.read_trace(folder / f"{side}.jsonl"))) for side in ("rollout", "train")
    }
    report = mp.compare([sides["rollout"]], [sides["train"]])
    first = report.first
    draw = Drawing(
        860,
        330,
        "Parity: one conversation in the engine and in the trainer, and the first difference",
    )
    draw.text(20, 30, "One conversation, laid out by the engine and by the trainer", bold=True)
    scale = 700 / max(map(len, sides.values()))
    for k, (name, side) in enumerate(sides.items()):
        y = 70 + 74 * k
        (run,), (loss,) = side.modality_spans, side.loss_spans
        draw.text(20, y + 20, name, size=14, colour=PALE)
        parts = [
            (0, run.start, "text", "prompt"),
            (run.start, run.stop, "image", f"{run.stop - run.start} placeholders"),
        ]
        parts += [
            (run.stop, loss.start, "text", "question"),
            (loss.start, len(side), "loss", "response"),
        ]
        for start, stop, kind, words in parts:
            draw.box(100 + start * scale, y, (stop - start) * scale, 30, kind)
            wide = (stop - start) * scale > 8 * len(words)
            draw.text(
                100 + (start + stop) / 2 * scale,
                y + (20 if wide else 45),
                words,
                size=12,
                anchor="middle",
            )
    x = 100 + first.index * scale
    draw.line((x, 52), (x, 176), colour=COLOURS["bad"][1], dashed=True)
    draw.text(
        x + 6,
        60,
        f"first difference: {first.field} at {first.index}",
        size=12,
        colour=COLOURS["bad"][1],
    )
    draw.box(100, 216, 700, 92, "bad")
    draw.text(116, 240, f"cause: {first.cause}", bold=True)
    draw.text(116, 264, f"evidence: {first.evidence}", size=13)
    draw.text(116, 288, f"fix: {first.fix}", size=13)
    return draw.svg()


def replay() -> str:
    draw = Drawing(
        860, 390, "Replay: what the engine did is recorded, and the trainer does the same"
    )
    heads = ["the engine", "the trace", "the trainer", "without it, in silence"]
    columns = [20, 230, 440, 650]
    for x, head in zip(columns, heads, strict=True):
        draw.text(x + 95, 30, head, bold=True, anchor="middle")
    rows = [
        (
            "draws from the ids\nthat top-p left",
            "kept_ids",
            "softmax over\nthe same ids",
            "every ratio is off\nby the mass cut off",
        ),
        (
            "routes each token\nto some experts",
            "routed_experts",
            "routers take\nthe same experts",
            "another model\nis trained",
        ),
        (
            "scores what it drew",
            "rollout_logprobs",
            "ratio to these:\ntis, mis",
            "off-policy tokens\ncount as on-policy",
        ),
        (
            "takes frames of a clip\nat its own times",
            "second_per_grid_ts",
            "positions of\nthe same times",
            "the clip seems faster\nor slower",
        ),
    ]
    for k, row in enumerate(rows):
        y = 52 + 82 * k
        for column, (x, words) in enumerate(zip(columns, row, strict=True)):
            kind = ("text", "loss", "loss2", "bad")[column]
            draw.box(x, y, 190, 60, kind, words, size=13, code=column == 1)
        for x in columns[:2]:
            gap = columns[columns.index(x) + 1]
            draw.line((x + 190, y + 30), (gap, y + 30), arrow=True)
    return draw.svg()
