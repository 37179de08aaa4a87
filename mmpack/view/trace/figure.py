"""The figure for a paper: per sample its new screens with marks, a bar of all its tokens, what the policy wrote.

Sizes are in units of a page of 1,440; a pixel is half a unit. The font is Pillow's own.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mmpack.schema.sample import Sample
from mmpack.view.figures import light_colours
from mmpack.view.sheet import Sheet
from mmpack.view.trace.choose import Options
from mmpack.view.trace.episodes import Node, episodes_of
from mmpack.view.trace.places import Mark
from mmpack.view.trace.roles import (
    AUDIO,
    LETTERS,
    OF_MODALITY,
    ROLES,
    Row,
    rows_of,
    texts_of,
    visible,
)
from mmpack.view.trace.scores import Placed, placed_scores
from mmpack.view.trace.screens import Look, Pictures, Screen, new_marks, new_media, screen_of

if TYPE_CHECKING:
    pass

WIDTH, MARGIN, GAP = 1440, 36, 18
SCREEN_HIGH, SCREEN_WIDE, SCREENS = 210.0, 320.0, 3  # of a screen; how many of a sample
BAR, LINE = 22, 22  # heights of the bar of tokens and of a line of text
LINES = 4  # of text of a row
PAPER, INK, SOFT, RULE = "#ffffff", "#1b2129", "#56616d", "#d8dee5"
_LIGHT = light_colours("trace.css")
COLOURS = tuple(_LIGHT[name] for name in ROLES)
MARKS = {"region": "#ff7aa2", "target": "#35d6ff", "action": "#ffd633"}
SCORES = {"reward": _LIGHT["good"], "cost": _LIGHT["bad"], "verdict": INK}


def figure(samples: Sequence[Sample], note: str, options: Options) -> tuple[bytes, dict[str, str]]:
    """The PNG, and for each medium that is drawn without its picture why. Raises: ArgumentError for a
    figure that is too high, MissingExtraError without Pillow.
    """
    pictures, sheet = Pictures(options), Sheet(WIDTH, PAPER)
    heard = any(m.modality == "audio" for sample in samples for m in sample.media)
    _top(sheet, options.title, note, [i for i in range(len(ROLES)) if heard or i != AUDIO])
    for episode in episodes_of(samples):
        sheet.y += GAP
        x = sheet.text(MARGIN, sheet.y, f"{episode.kind} ", 18, SOFT)
        sheet.text(x, sheet.y, episode.name, 18, INK)
        sheet.y += 34
        for node in episode.nodes:
            _band(sheet, node, texts_of(node.sample, options.tokenizer), pictures.look)
    out = io.BytesIO()
    sheet.image(sheet.y + MARGIN // 2).save(out, "PNG", optimize=True)
    return out.getvalue(), pictures.missing


def _top(sheet: Sheet, title: str, note: str, roles: Sequence[int]) -> None:
    """Title and key of these roles."""
    sheet.text(MARGIN, 28, title, 26, INK)
    if note:
        sheet.text(MARGIN, 62, note, 15, SOFT)
    x, y = float(MARGIN), 62 + 26 * bool(note)
    for i in roles:
        x = _letter(sheet, x, y, i)
        x = sheet.text(x + 6, y, ROLES[i], 15, INK) + 18
    for name, colour in MARKS.items():
        sheet.box((x, y + 1, x + 17, y + 18), INK, None, 4)
        sheet.box((x + 3, y + 4, x + 14, y + 15), None, colour, 2, 2)
        words = "clicked" if name == "action" else name
        x = sheet.text(x + 23, y, words, 15, INK) + 18
    sheet.text(x, y, "high bar: in the loss", 15, SOFT)
    sheet.y = y + 30


def _letter(sheet: Sheet, x: float, y: float, role: int) -> float:
    sheet.box((x, y, x + 18, y + 18), COLOURS[role], None, 4)
    width = sheet.width(LETTERS[role], 13)
    sheet.text(x + 9 - width / 2, y + 2, LETTERS[role], 13, PAPER)
    return x + 18


def _band(sheet: Sheet, node: Node, texts: list[str] | None, look: Look) -> None:
    """One sample: screens to the left, tokens to the right."""
    sample, top = node.sample, sheet.y
    sheet.rule(MARGIN, WIDTH - MARGIN, top, RULE)
    marks = new_marks(node)
    shown = new_media(node, marks)
    x, bottom = float(MARGIN), top
    for index in shown[:SCREENS]:
        screen = screen_of(sample, index, marks, look, SCREEN_HIGH, SCREEN_WIDE)
        _screen(sheet, (x, top + 14), screen)
        x, bottom = x + screen.width + GAP, max(bottom, top + 14 + screen.height)
        if x > WIDTH / 2:
            break
    left = x if shown else MARGIN
    y = top + 12
    facts = [sample.sample_id, "" if sample.turn is None else f"turn {sample.turn}"]
    facts.append(f"{len(sample):,} tokens, {sample.num_loss_tokens:,} in the loss")
    at = sheet.text(left, y, facts[0], 18, INK)
    sheet.text(at + 12, y + 2, "  ·  ".join(f for f in facts[1:] if f), 15, SOFT)
    y += 30
    scores = placed_scores(sample, node.roles)
    y = _chips(
        sheet, left, y, [s for s in scores if s.level == "sequence" or s.stop <= node.shared]
    )
    if node.parent is not None:
        words = f"{node.relation} {node.parent.sample.sample_id} after {node.shared:,} tokens"
        sheet.text(left, y, words, 15, SOFT)
        y += 24
    y = _bar(sheet, left, y, node) + 12
    for row in rows_of(node.roles, node.shared, ()):
        if row.loss:
            y = _row(sheet, left, y, sample, row, texts, scores)
    sheet.y = max(y, bottom) + GAP


def _bar(sheet: Sheet, left: float, y: float, node: Node) -> float:
    """All tokens from left to right, to scale; those outside the loss at half height, those shared paler."""
    scale = (WIDTH - MARGIN - left) / max(len(node.sample), 1)
    for row in rows_of(node.roles, 0, (node.shared,)):
        for start, stop in pairwise(row.cuts):
            a, b = left + start * scale, left + stop * scale
            colour = COLOURS[row.role]
            if stop <= node.shared:
                colour = sheet.mixed(colour, PAPER, 0.35)
            top = y if row.loss else y + BAR / 2
            sheet.box((a, top, max(b, a + 1), y + BAR), colour, None)
    return y + BAR


def _row(
    sheet: Sheet,
    left: float,
    y: float,
    sample: Sample,
    row: Row,
    texts: list[str] | None,
    scores: Sequence[Placed],
) -> float:
    """What the policy wrote, on its ground, and the scores that end there."""
    if row.role in OF_MODALITY.values():  # a broken sample: placeholders in the loss
        words = f"media[{row.medium}]"
    elif texts is None:
        words = " ".join(map(str, sample.input_ids[row.start : row.stop].tolist()))
    else:
        words = visible("".join(texts[row.start : row.stop])).replace("↵", "")
    wide = WIDTH - MARGIN - left - 44
    lines = sheet.wrapped(words, 15, wide, LINES)
    high = LINE * len(lines) + 8
    ground = sheet.mixed(COLOURS[row.role], PAPER, 0.12)
    sheet.box((left, y, WIDTH - MARGIN, y + high), ground, None, 4)
    sheet.box((left, y, left + 5, y + high), COLOURS[row.role], None)
    _letter(sheet, left + 14, y + 5, row.role)
    for k, line in enumerate(lines):
        sheet.text(left + 40, y + 5 + LINE * k, line, 15, INK)
    ending = [s for s in scores if s.level != "sequence" and row.start < s.stop <= row.stop]
    return _chips(sheet, left + 40, y + high + 4, ending) + (0 if ending else 2)


def _chips(sheet: Sheet, left: float, y: float, scores: Sequence[Placed]) -> float:
    """Scores as words, as many lines as they need; the next y."""
    x, high = left, 22
    for score in scores:
        words, about = f"{score.kind} {score.name} {score.number}", f" {score.scope}"
        wide = sheet.width(words + about, 14) + 16
        if x > left and x + wide > WIDTH - MARGIN:
            x, y = left, y + high + 4
        sheet.box((x, y, x + wide, y + high), PAPER, SCORES[score.kind], 5)
        end = sheet.text(x + 8, y + 3, words, 14, SCORES[score.kind])
        sheet.text(end, y + 3, about, 14, SOFT)
        x += wide + 8
    return y + high + 6 if scores else y


# ---- screens -------------------------------------------------------------------------------------


def _screen(sheet: Sheet, at: tuple[float, float], screen: Screen) -> None:
    """A screen with its marks."""
    (x, y), width, height = at, screen.width, screen.height
    if screen.picture is None:
        ground = sheet.mixed(COLOURS[OF_MODALITY[screen.modality]], PAPER, 0.12)
        sheet.box((x, y, x + width, y + height), ground, None)
        across, down = screen.lattice.places
        for share in across[1:-1]:
            sheet.line([(x + share * width, y), (x + share * width, y + height)], RULE, 0.5)
        for share in down[1:-1]:
            sheet.line([(x, y + share * height), (x + width, y + share * height)], RULE, 0.5)
    else:
        sheet.picture(screen.picture, at, (width, height))
    sheet.box((x, y, x + width, y + height), None, RULE)
    for mark in screen.marks:
        _draw_mark(sheet, at, width, height, mark)


def _draw_mark(
    sheet: Sheet, at: tuple[float, float], width: float, height: float, mark: Mark
) -> None:
    placed = mark.placed(width, height)
    left, top = placed.x + at[0], placed.y + at[1]
    for colour, wide in ((INK, 4.0), (MARKS[mark.role], 1.8)):
        if mark.shape == "box":
            right, bottom = left + placed.width, top + placed.height
            corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
            sheet.line(corners, colour, wide, dashed=mark.role == "target" and colour != INK)
            continue
        sheet.ring((left, top), 7, colour, wide)
        for line in placed.lines:
            sheet.line([(x + at[0], y + at[1]) for x, y in line], colour, wide)
    x, y = placed.label
    sheet.outlined(at[0] + x, at[1] + y - 12, mark.letter, 13, MARKS[mark.role], INK)
