"""What each token of a sample is: its role, its turn, whether the loss reads it; and the pieces where that is constant.

Token indices of one sample [L], half-open. Spans that reach beyond the ids are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.layout.token_text import token_text
from mmpack.schema.sample import Sample
from mmpack.schema.turns import span_turns
from mmpack.view.forest import pieces

ROLES = ("prompt", "picture", "video", "observation", "response", "thought", "action", "audio")
PROMPT, PICTURE, VIDEO, OBSERVATION, RESPONSE, THOUGHT, ACTION, AUDIO = range(8)
LETTERS = ("P", "I", "V", "O", "R", "T", "A", "S")
MEANING = (
    "text that no span claims: prompt, template, earlier turns",
    "placeholders of an image",
    "placeholders of a video",
    "what came back: a screen, a tool, the environment, a user",
    "what the policy wrote, of no closer kind",
    "what the policy wrote: reasoning",
    "an action, also one of an earlier turn",
    "placeholders of an audio, also of a video's sound",
)
OF_MODALITY = {"image": PICTURE, "video": VIDEO, "audio": AUDIO}
_OF_KIND = {"response": RESPONSE, "reasoning": THOUGHT, "action": ACTION}
NO_TURN = -1


@dataclass(frozen=True, eq=False)
class Roles:
    """Arrays [L]."""

    role: np.ndarray  # int8: index into ROLES
    loss: np.ndarray  # bool
    turn: np.ndarray  # int64: NO_TURN where no span says it
    medium: np.ndarray  # int64: index of the medium of a placeholder, else -1


@dataclass(frozen=True)
class Row:
    """A stretch of one role, turn and loss, in the places where spans or scores begin."""

    start: int
    stop: int
    role: int
    loss: bool
    turn: int
    medium: int
    cuts: tuple[int, ...]  # from start to stop


def roles_of(sample: Sample) -> Roles:
    """What each token is. An action is one whether or not the loss reads it."""
    length = len(sample)
    role = np.full(length, PROMPT, np.int8)
    loss = np.zeros(length, bool)
    turn = np.full(length, NO_TURN, np.int64)
    medium = np.full(length, -1, np.int64)
    for span in sample.observation_spans or ():
        role[within(span, length)] = OBSERVATION
        turn[within(span, length)] = _turn(span)
    for loss_span, number in zip(sample.loss_spans, span_turns(sample), strict=True):
        inside = within(loss_span, length)
        loss[inside] = True
        role[inside] = _OF_KIND.get(loss_span.kind, RESPONSE)
        turn[inside] = NO_TURN if number is None else number
    for action in sample.action_spans or ():
        inside = within(action, length)
        role[inside] = ACTION
        if action.turn is not None:
            turn[inside] = np.where(turn[inside] == NO_TURN, action.turn, turn[inside])
    for placeholder in sample.modality_spans:
        inside = within(placeholder, length)
        role[inside] = OF_MODALITY[placeholder.modality]
        medium[inside] = placeholder.media_index
    return Roles(role, loss, turn, medium)


def within(span: Any, length: int) -> slice:
    """A span's tokens among `length`; nothing for one that runs backwards."""
    start = min(max(span.start, 0), length)
    return slice(start, min(max(span.stop, start), length))


def rows_of(roles: Roles, start: int, edges: Iterable[int]) -> list[Row]:
    """The rows from token `start` on; `edges`: where else a row is cut into pieces."""
    length = len(roles.role)
    inner = np.unique([e for e in edges if start < e < length]).astype(np.int64)
    out = []
    for a, b in pieces(roles.role, roles.loss, roles.turn, roles.medium, start=start):
        cuts = inner[np.searchsorted(inner, a, "right") : np.searchsorted(inner, b, "left")]
        role, loss, turn = int(roles.role[a]), bool(roles.loss[a]), int(roles.turn[a])
        out.append(Row(a, b, role, loss, turn, int(roles.medium[a]), (a, *cuts.tolist(), b)))
    return out


def repeats(ids: np.ndarray, start: int, stop: int, least: int) -> list[tuple[int, int, bool]]:
    """(start, stop, whether all ids are equal): runs of `least` or more equal ids, and what lies between them."""
    part = ids[start:stop]
    bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    long = [(a, b) for a, b in pairwise(bounds) if b - a >= least]
    out, at = [], 0
    for a, b in long:
        if at < a:
            out.append((start + at, start + a, False))
        out.append((start + a, start + b, True))
        at = b
    if at < len(part):
        out.append((start + at, stop, False))
    return out


def edges_of(spans: Sequence[Any]) -> list[int]:
    """Both ends of each span."""
    return [edge for span in spans for edge in (span.start, span.stop)]


def _turn(span: Any) -> int:
    return NO_TURN if span.turn is None else int(span.turn)


KEY = "token_texts"  # in `Sample.metadata`
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}


def texts_of(sample: Sample, tokenizer: Any) -> list[str] | None:
    """One text per token; "" where a token only continues a character. None where nothing gives a text."""
    if tokenizer is not None:
        found = token_text(sample.input_ids, tokenizer)
        # a character belongs to the token of its first byte
        bounds = np.searchsorted(found.token_of, np.arange(len(sample) + 1)).tolist()
        return [found.text[a:b] for a, b in pairwise(bounds)]
    recorded = sample.metadata.get(KEY)
    if isinstance(recorded, list) and len(recorded) == len(sample):
        return [text if isinstance(text, str) else str(text) for text in recorded]
    return None


@lru_cache(maxsize=1 << 16)
def visible(text: str) -> str:
    """Line ends as a sign and a line end, what can't be printed as its escape."""
    return "".join(VISIBLE.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)
