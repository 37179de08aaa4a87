"""Figures of a pack: the attention rule, the forest, the rows that the loss reads, media."""

from __future__ import annotations

from figures_trace import PLACEHOLDER, sample
from svg import COLOURS, INK, PALE, Drawing

import mmpack as mp

WORDS = {1: "p", 2: "q", 3: "a", 4: "b", 5: "c", 6: "d", 7: "e", 8: "f"}


def answers(*paths: list[int], prompt: int = 2) -> list[mp.Sample]:
    """Samples of text: what is behind the prompt is the response."""
    return [
        sample(f"s{k}", ids, loss_spans=[{"start": prompt, "stop": len(ids), "kind": "response"}])
        for k, ids in enumerate(paths)
    ]


def kind_of(word: int) -> str:
    return "text" if word < 3 else "loss" if word < 5 else "loss2"


def visible_until() -> str:
    pair = answers([1, 2, 3, 4], [1, 2, 5, 6])
    draw = Drawing(860, 460, "visible_until of a plain pack and of one with a shared prefix")
    draw.text(20, 30, "Row q sees row k exactly if k ≤ q < visible_until[k]", bold=True)
    for left, shared, title in (
        (110, False, "plain: the prompt twice"),
        (560, True, "shared: the prompt once"),
    ):
        batch = mp.pack(pair, share_prefix=shared)
        ids, until, w = batch.input_ids.tolist(), batch.visible_until.tolist(), 34
        top = 110
        draw.text(left, 62, f"{title}, {len(ids)} rows", size=13)
        draw.strip(left, top - 36, [(WORDS[i], kind_of(i)) for i in ids], w, 28)
        for q, i in enumerate(ids):
            draw.box(left - 40, top + q * w + 3, 32, 28, kind_of(i), WORDS[i], size=13)
            for k, bound in enumerate(until):
                seen = k <= q < bound
                draw.box(
                    left + k * w,
                    top + q * w,
                    w,
                    w,
                    kind_of(ids[k]) if seen else "none",
                    "●" if seen else "",
                )
        bottom = top + len(ids) * w + 22
        draw.numbers(left, bottom, until, w, INK)
        draw.text(left - 8, bottom, "until", size=12, anchor="end", colour=PALE)
    draw.text(
        60, 440, "columns: row k, which is seen · rows: row q, which sees", size=12, colour=PALE
    )
    return draw.svg()


def forest() -> str:
    group = answers([1, 2, 3, 4, 7], [1, 2, 3, 4, 8], [1, 2, 5, 6])
    batch = mp.pack(group, share_prefix=True)
    ids, w = batch.input_ids.tolist(), 44
    offsets, parents = batch.segment_offsets.tolist(), batch.segment_parent.tolist()
    last = batch.sample_segment.tolist()
    draw = Drawing(860, 400, "Three samples as a forest of segments, and the packed row")
    total = sum(map(len, group))
    draw.text(20, 30, f"{len(group)} samples, {total} tokens", bold=True)
    for k, one in enumerate(group):
        draw.text(20, 72 + 44 * k, one.sample_id, size=13, colour=PALE)
        cells = [(WORDS[i], kind_of(i)) for i in one.input_ids.tolist()]
        draw.strip(52, 52 + 44 * k, cells, w)
    draw.text(380, 30, f"{len(parents)} segments, {len(ids)} rows", bold=True)
    # depth to the right; leaves below one another
    depth = [0] * len(parents)
    for g, parent in enumerate(parents):
        depth[g] = 0 if parent < 0 else depth[parent] + 1
    leaves = [g for g in range(len(parents)) if g not in parents]
    middle: dict[int, float] = {g: 67 + 62 * k for k, g in enumerate(leaves)}
    for g in reversed(range(len(parents))):
        below = [middle[c] for c in range(len(parents)) if parents[c] == g]
        if below:
            middle[g] = sum(below) / len(below)
    for g, parent in enumerate(parents):
        x = 380 + 150 * depth[g]
        own = [(WORDS[i], kind_of(i)) for i in ids[offsets[g] : offsets[g + 1]]]
        draw.strip(x, middle[g] - 15, own, w)
        draw.text(x, middle[g] - 20, f"segment {g}", size=11, colour=PALE)
        if parent >= 0:
            start = 380 + 150 * depth[parent] + w * (offsets[parent + 1] - offsets[parent])
            draw.line((start, middle[parent]), (x - 2, middle[g]), arrow=True)
        for k, segment in enumerate(last):
            if segment == g:
                draw.text(
                    x + w * len(own) + 8, middle[g] + 5, f"ends {group[k].sample_id}", size=12
                )
    y = 262
    draw.text(20, y - 14, "The pack: segments depth first", bold=True)
    draw.strip(190, y, [(WORDS[i], kind_of(i)) for i in ids], w)
    for g in range(len(parents)):
        x0, x1 = 190 + offsets[g] * w, 190 + offsets[g + 1] * w
        draw.line((x0 + 2, y + 34), (x0 + 2, y + 40), (x1 - 2, y + 40), (x1 - 2, y + 34))
        draw.text((x0 + x1) / 2, y + 54, str(g), size=12, anchor="middle", colour=PALE)
    for k, (name, values) in enumerate(
        [("segment_offsets", offsets), ("segment_parent", parents), ("sample_segment", last)]
    ):
        draw.text(20, y + 82 + 20 * k, f"{name} = {values}", size=13, code=True)
    return draw.svg()


def loss_rows() -> str:
    pair = answers([1, 2, 3, 4], [1, 2, 5, 6])
    batch = mp.pack(pair, share_prefix=True)
    ids, w, x = batch.input_ids.tolist(), 76, 200
    rows, targets = batch.loss_rows.tolist(), batch.loss_targets.tolist()
    draw = Drawing(
        860, 370, "Loss rows: each loss token is predicted by the row before it on its own path"
    )
    draw.text(
        20, 30, "Each loss token is predicted by the row before it on its own path", bold=True
    )
    draw.text(20, 90, "packed rows", size=13, colour=PALE)
    draw.numbers(x, 62, list(range(len(ids))), w)
    read = set(rows)
    for k, i in enumerate(ids):
        draw.box(x + k * w, 70, w, 34, kind_of(i), WORDS[i])
        if k not in read:
            draw.text(x + (k + 0.5) * w, 122, "not read", size=11, anchor="middle", colour=PALE)
    draw.text(20, 222, "loss tokens [N]", size=13, colour=PALE)
    for n, (row, target) in enumerate(zip(rows, targets, strict=True)):
        at = x + 70 + n * 100
        draw.box(at - 30, 200, 60, 34, kind_of(target), WORDS[target])
        draw.line(
            (x + (row + 0.5) * w, 106), (at, 198), arrow=True, colour=COLOURS[kind_of(target)][1]
        )
    lists = (
        ("loss_rows", rows),
        ("loss_rows_unique", batch.loss_rows_unique.tolist()),
        ("loss_row_inverse", batch.loss_row_inverse.tolist()),
    )
    for k, (name, values) in enumerate(lists):
        draw.text(20, 272 + 22 * k, f"{name} = {values}", size=13, code=True)
    draw.text(
        20,
        348,
        "Row 1 is read twice and computed once. A row that nobody reads may hold NaN.",
        size=13,
    )
    return draw.svg()


def media_once() -> str:
    P = [PLACEHOLDER] * 4
    asked = [([*P, 1, 3], [0]), ([*P, 1, 5], [0]), ([*P, *[1], *P, 3], [0, 1]), ([*P, 2, 5], [1])]
    group = [
        sample(
            f"s{k}",
            ids,
            pictures=pictures,
            loss_spans=[{"start": len(ids) - 1, "stop": len(ids), "kind": "response"}],
        )
        for k, (ids, pictures) in enumerate(asked)
    ]
    batch = mp.pack(group)
    occurrence = batch.media_occurrence.tolist()
    draw = Drawing(860, 340, "Each medium is encoded once, and its features go to each of its runs")
    draw.text(20, 30, f"{len(occurrence)} runs of placeholders in {len(group)} samples", bold=True)
    draw.text(560, 30, f"{len(batch.media)} media, each encoded once", bold=True)
    kinds, w, run = ("image", "image2"), 30, 0
    colours = [COLOURS[kind][1] for kind in kinds]
    for k, one in enumerate(group):
        y = 56 + 52 * k
        draw.text(20, y + 20, one.sample_id, size=13, colour=PALE)
        ids = one.input_ids.tolist()
        shown = [(WORDS.get(i, "▢"), "text" if i in (1, 2) else "loss") for i in ids]
        for span in one.modality_spans:
            medium = occurrence[run]
            shown[span.start : span.stop] = [("▢", kinds[medium])] * 4
            run += 1
        draw.strip(56, y, shown, w, 30)
        numbers = sorted({occurrence[run - 1 - j] for j in range(len(one.modality_spans))})
        for j, medium in enumerate(numbers):
            draw.line(
                (554, 95 + 90 * medium),
                (62 + len(ids) * w, y + 10 + 10 * j),
                arrow=True,
                colour=colours[medium],
            )
    for m, medium in enumerate(batch.media):
        draw.box(
            556,
            70 + 90 * m,
            270,
            50,
            kinds[m],
            f"media[{m}]: {medium.media_id}\n{list(medium.grid_thw)} patches, {medium.num_tokens} tokens",
            size=13,
        )
    draw.text(20, 288, f"media_occurrence = {occurrence}", size=13, code=True)
    patches = 16
    draw.text(
        20,
        314,
        f"{patches * len(batch.media)} patches go through the tower, and not {patches * len(occurrence)}.",
        size=13,
    )
    return draw.svg()
