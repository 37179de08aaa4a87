"""Parts of what the policy wrote in a turn: thoughts, calls of actions, and the rest.

A turn is a run of loss spans that touch and are of one turn. Characters count from the start of its text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.layout.token_text import TokenText, token_text
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LOSS_KINDS, LossSpan
from mmpack.trajectory.actions.formats import get_format
from mmpack.trajectory.actions.qwen import Call, Format

THINK = ("<think>", "</think>")
_BEFORE = 16  # tokens before a turn in which a prompt may have opened a thought


@dataclass(frozen=True)
class Written:
    """A turn: tokens [start, stop) of the sample, its text, and its parts."""

    start: int
    stop: int
    turn: int | None
    text: TokenText
    thoughts: list[tuple[int, int]]  # characters, the marks included
    calls: list[Call]


def written_turns(
    what: str, sample: Sample, tokenizer: Any, form: Format, think: tuple[str, str] | None
) -> Iterator[Written]:
    """The turns of a sample. Raises ArgumentError, in the name of the function `what`."""
    if not isinstance(sample, Sample):
        raise ArgumentError(
            f"{what}: sample is {kind_of(sample)}, expected a Sample. Fix: pass one sample"
        )
    check_think(what, think)
    for start, stop, turn in _runs(what, sample):
        text = token_text(sample.input_ids, tokenizer, start, stop)
        opened = False
        if think is not None:
            before = token_text(sample.input_ids, tokenizer, max(0, start - _BEFORE), start)
            opened = before.text.rstrip().endswith(think[0])
        thoughts, calls = parts(text.text, form, think, opened)
        yield Written(start, stop, turn, text, thoughts, calls)


def parts(
    text: str, form: Format, think: tuple[str, str] | None, opened: bool = False
) -> tuple[list[tuple[int, int]], list[Call]]:
    """The thoughts of a text, [start, stop) of characters, and the calls outside of them. Linear in the text.

    `opened`: the text begins within a thought. A thought without an end goes to the end. An end without a beginning,
    before any other mark, ends a thought that began with the text. What opens first has what is within: a mark of
    thinking in the JSON of a call is text, and a call in a thought is not made.
    """
    thoughts: list[tuple[int, int]] = []
    calls: list[Call] = []
    at = 0
    call = form.next_call(text, 0)
    begin = text.find(think[0]) if think else -1
    if think:
        end = text.find(think[1])
        marks = [begin] * (begin >= 0) + ([] if call is None else [call.start])
        if opened or (end >= 0 and all(end < mark for mark in marks)):
            at = len(text) if end < 0 else end + len(think[1])
            thoughts.append((0, at))
    while at < len(text):
        if call is not None and call.start < at:
            call = form.next_call(text, at)
        if think and 0 <= begin < at:
            begin = text.find(think[0], at)
        if think and begin >= 0 and (call is None or begin < call.start):
            end = text.find(think[1], begin + len(think[0]))
            at = len(text) if end < 0 else end + len(think[1])
            thoughts.append((begin, at))
        elif call is not None:
            calls.append(call)
            at = call.stop
        else:
            break
    return thoughts, calls


def check_think(what: str, think: Any) -> None:
    """Raise ArgumentError unless `think` is two marks, or None."""
    marks = isinstance(think, (tuple, list)) and len(think) == 2
    if think is None or (marks and all(isinstance(mark, str) and mark for mark in think)):
        return
    raise ArgumentError(
        f"{what}: think is {kind_of(think)}, expected two marks. "
        "Fix: pass ('<think>', '</think>'), or None if the policy marks no thoughts"
    )


def _runs(what: str, sample: Sample) -> list[tuple[int, int, int | None]]:
    """[start, stop) and turn of each run of loss spans that touch and are of one turn; empty ones are left out."""
    runs: list[tuple[int, int, int | None]] = []
    end = 0
    for i, span in enumerate(sample.loss_spans):
        if not end <= span.start <= span.stop <= len(sample):
            raise ArgumentError(
                f"{what}: loss_spans[{i}] is [{span.start}, {span.stop}), which begins before {end} or ends beyond "
                f"{len(sample)} tokens (MM201). Fix: sort the spans, without overlap"
            )
        if span.start == span.stop:
            continue
        if runs and runs[-1][1] == span.start and runs[-1][2] == span.turn:
            runs[-1] = (runs[-1][0], span.stop, span.turn)
        else:
            runs.append((span.start, span.stop, span.turn))
        end = span.stop
    return runs


# ---- kinds of loss ----------------------------------------------------------------------------------


def loss_kinds(
    sample: Sample,
    tokenizer: Any,
    format: str | Format = "computer_use",
    *,
    think: tuple[str, str] | None = THINK,
) -> Sample:
    """The sample with its loss spans cut by kind: a thought is `reasoning`, a call `action`, the rest `response`.

    Args: `tokenizer`: see `mmpack.layout.token_text`. `format`: in which calls are written: `json`, `computer_use`,
    `mobile_use`. `think`: the marks of a thought, which are of it; None where there are none. A thought that the prompt
    opened, or that nothing ends, is one too.
    A token that straddles parts is of the call that it touches, else of the thought. A malformed call is `action`: the
    policy tried one. The loss tokens are the same ones in the same order, so that `rollout_logprobs` still fit.
    Returns: a copy, with loss spans of its own.
    Raises: ArgumentError.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> from mmpack.trajectory import loss_kinds
        >>> words = [b"Go on.", b"<think>", b"Hm", b"</think>", b"Yes."]
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", np.arange(5), [], [], [mp.LossSpan(1, 5, turn=0)])
        >>> [(s.start, s.stop, s.kind) for s in loss_kinds(sample, words.__getitem__).loss_spans]
        [(1, 4, 'reasoning'), (4, 5, 'response')]
    """
    form = get_format("loss_kinds", format)
    return with_kinds(sample, list(written_turns("loss_kinds", sample, tokenizer, form, think)))


def with_kinds(sample: Sample, turns: list[Written]) -> Sample:
    """Return the sample with its loss spans cut by kind, as `loss_kinds` does."""
    response, action, reasoning = map(LOSS_KINDS.index, ("response", "action", "reasoning"))
    kinds = np.full(len(sample), response)
    for turn in turns:
        for kind, ranges in (
            (reasoning, turn.thoughts),
            (action, [(call.start, call.stop) for call in turn.calls]),
        ):
            for chars in ranges:
                start, stop = turn.text.span(*chars)
                kinds[start:stop] = kind
    spans: list[LossSpan] = []
    for span in sample.loss_spans:
        cuts = span.start + 1 + np.flatnonzero(np.diff(kinds[span.start : span.stop]))
        edges = [span.start, *cuts.tolist(), span.stop]
        for start, stop in pairwise(edges):
            said = LOSS_KINDS[kinds[start]] if start < stop else span.kind
            spans.append(LossSpan(start, stop, said, span.turn, dict(span.metadata)))
    out = copy.copy(sample)
    out.loss_spans = _joined(spans)
    return out


def _joined(spans: list[LossSpan]) -> list[LossSpan]:
    """Spans that touch and say the same become one: a sample that is cut again stays as it is."""
    out: list[LossSpan] = []
    for span in spans:
        last = out[-1] if out else None
        if (
            last is not None
            and last.start < last.stop == span.start < span.stop
            and (last.kind, last.turn, last.metadata) == (span.kind, span.turn, span.metadata)
        ):
            last.stop = span.stop
        else:
            out.append(span)
    return out
