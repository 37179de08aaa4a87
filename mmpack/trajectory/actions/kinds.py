"""Loss spans by what the policy wrote: `reasoning`, `action`, `response`. Which tokens carry loss stays as it is."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.schema.sample import Sample
from mmpack.schema.spans import LOSS_KINDS, LossSpan
from mmpack.trajectory.actions.formats import Format, get_format
from mmpack.trajectory.actions.parts import THINK, Written, written_turns


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
    """See `loss_kinds`."""
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
