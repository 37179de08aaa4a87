"""Text tokens that differ: prompts and observations (chat_template); `responses.py` has the responses.

Text is compared with placeholders taken out, so that images of other sizes don't count as other text.
"""

from __future__ import annotations

import numpy as np

from mmpack.layout.runs import true_runs
from mmpack.parity.causes.cut import cut_at_left
from mmpack.parity.causes.frame_choice import OF_SECONDS
from mmpack.parity.causes.pair import (
    Decode,
    Hit,
    Pair,
    common_prefix,
    possible,
    show,
    stamp_of,
)
from mmpack.parity.causes.responses import TextCut, one_of_many, response_hits, text_hit
from mmpack.parity.causes.turns import prompt_of_response, system_turn
from mmpack.parity.fixes import UNKNOWN


def text_hits(pair: Pair, media: list[Hit], decode: Decode | None) -> list[Hit]:
    """One hit for each kind of text that differs; none if all text is equal, or follows from the hits of `media`."""
    return _markers(pair) + _text(pair, media, decode)


def _markers(pair: Pair) -> list[Hit]:
    if not pair.other_markers:
        return []
    fenced = pair.sides[0] if True in pair.left.markers[1] else pair.sides[1]
    first, _, i = pair.left.framed[0]
    at = pair.left.markers[0][0] if fenced is pair.left else stamp_of(first)
    shown = "vision start and end around the video", "none around it"
    left, right = shown if fenced is pair.left else shown[::-1]
    evidence = f"only {fenced.name} has vision start and end around all of media[{i}]"
    return [Hit("video_markers", "input_ids", evidence, left, right, at, at=at)]


def _text(pair: Pair, media: list[Hit], decode: Decode | None) -> list[Hit]:
    prefix, suffix = pair.common
    n, m = (len(ids) for ids in pair.text_ids)
    if prefix == n == m:
        return []
    left, right = (prefix, n - suffix), (prefix, m - suffix)
    inside = np.concatenate([pair.text_loss[0][slice(*left)], pair.text_loss[1][slice(*right)]])
    if not inside.any() and _timestamp(pair, media, left, right):
        return []
    if not inside.any():
        return [_prompt(pair, left, right)]
    if inside.all():
        return response_hits(pair, left, right, decode)
    return _by_turn(pair, media, decode)


def _timestamp(pair: Pair, media: list[Hit], left: TextCut, right: TextCut) -> bool:
    """Whether the cuts lie in the timestamp before a video of which `media` says that its frames or seconds differ.

    Or that it may be another video.
    """
    if not any(
        hit.cause in (*OF_SECONDS, "timestamp_rounding")
        or (hit.cause == UNKNOWN and hit.index in pair.left.videos_in_text)
        for hit in media
    ):
        return False
    for side, tokens, (a, b) in zip(pair.sides, pair.text_tokens, (left, right), strict=True):
        start, stop = (int(tokens[k]) if k < len(tokens) else len(side) for k in (a, b))
        if not any(stamp_of(f) <= start and stop < f for f, _, _ in side.framed):
            return False
    return True


def _by_turn(pair: Pair, media: list[Hit], decode: Decode | None) -> list[Hit]:
    """Text and responses differ: compare them in turn, text between loss spans and text in them."""
    turns = [true_runs(mask) for mask in pair.text_loss]
    if len(turns[0]) != len(turns[1]):
        prefix, suffix = pair.common
        left, right = (
            (prefix, len(pair.text_tokens[0]) - suffix),
            (prefix, len(pair.text_tokens[1]) - suffix),
        )
        seen = f"text and loss spans differ: {len(turns[0])} against {len(turns[1])} loss spans; "
        causes = possible(
            *("chat_template", "retokenized_response", "rewritten_response"),
            *("stop_token", "truncated", "loss_mask_shift", "turn_without_loss"),
        )
        return [text_hit(pair, UNKNOWN, left, right, seen + causes)]
    prompts: list[Hit] = []
    responses: list[Hit] = []
    ends = [0, 0]
    for k in range(len(turns[0]) + 1):
        spans = [
            t[k] if k < len(t) else (len(w), len(w))
            for t, w in zip(turns, pair.text_tokens, strict=True)
        ]
        cut = _cut(pair, [(end, span[0]) for end, span in zip(ends, spans, strict=True)])
        if cut and not _timestamp(pair, media, *cut):
            prompts.append(_prompt(pair, *cut))
        if cut := _cut(pair, spans):
            responses += response_hits(pair, *cut, decode)
        ends = [span[1] for span in spans]
    return _first_of_each(prompts) + _first_of_each(one_of_many(responses))


def _first_of_each(hits: list[Hit]) -> list[Hit]:
    first: dict[str, Hit] = {}
    for hit in hits:
        first.setdefault(hit.cause, hit)
    return list(first.values())


def _cut(pair: Pair, spans: list[TextCut]) -> tuple[TextCut, TextCut] | None:
    """The part of two runs of text tokens in which they differ; None if they are equal."""
    a, b = (ids[slice(*span)] for ids, span in zip(pair.text_ids, spans, strict=True))
    prefix = common_prefix(a, b)
    if prefix == len(a) == len(b):
        return None
    rest = min(len(a), len(b)) - prefix
    suffix = common_prefix(a[len(a) - rest :][::-1], b[len(b) - rest :][::-1])
    (left, _), (right, _) = spans
    return (left + prefix, spans[0][1] - suffix), (right + prefix, spans[1][1] - suffix)


def _prompt(pair: Pair, left: TextCut, right: TextCut) -> Hit:
    if pads := _pads(pair, (left, right)):
        evidence = f"text outside the loss spans differs by {pads} pad ids, which one side lacks"
        if pads > 1:
            return text_hit(pair, "padding_in_ids", left, right, evidence)
        evidence += f"; {possible('padding_in_ids', 'stop_token')}"
        return text_hit(pair, UNKNOWN, left, right, evidence)
    hashes = [side.setting("chat_template") for side in pair.sides]
    # turns that are missing at the beginning may have been cut off, whatever the template is
    may_be_cut = cut_at_left(pair) and pair.left.openings.any()
    system = _system_turn(pair, left, right)
    two = None not in hashes and hashes[0] != hashes[1]
    if two and (system or not may_be_cut):
        evidence = f"processor.chat_template: rollout {show(hashes[0])}, train {show(hashes[1])}"
        return text_hit(pair, "chat_template", left, right, evidence)
    if None in hashes:
        evidence = (
            f"text outside the loss spans differs; no template hash; {possible('chat_template')}"
        )
        return text_hit(pair, UNKNOWN, left, right, evidence)
    if system:
        evidence = (
            "one template hash on both sides, the system's turn differs (the first one, whose role comes once): "
            "the system prompt or tools handed to it do"
        )
        return text_hit(pair, "chat_template", left, right, evidence)
    if not two and _before_response(pair, left, right):
        evidence = (
            "one template hash on both sides, the text between the opening of a turn and its response differs: "
            "the generation prompt"
        )
        return text_hit(pair, "chat_template", left, right, evidence)
    causes = ["chat_template", *(["truncated"] if may_be_cut else [])]
    under = "" if two else " under one template"
    evidence = f"text outside the loss spans differs{under}; {possible(*causes)}"
    return text_hit(pair, UNKNOWN, left, right, evidence)


def _pads(pair: Pair, cuts: tuple[TextCut, TextCut]) -> int:
    """The number of pad ids, where nothing else differs."""
    extra = [ids[slice(*cut)] for ids, cut in zip(pair.text_ids, cuts, strict=True)]
    pads = [(ids == pair.left.family.pad_token_id).all() for ids in extra]
    return sum(map(len, extra)) if all(pads) and not all(map(len, extra)) else 0


def _system_turn(pair: Pair, left: TextCut, right: TextCut) -> bool:
    """Whether the difference ends with the system's turn, which may be absent on one side."""
    for side, tokens, (start, stop) in zip(
        pair.sides, pair.text_tokens, (left, right), strict=True
    ):
        first = system_turn(side)
        if first is None and (start < stop or start > side.head + 1 or not side.openings.any()):
            return False
        # a turn's opening looks like the next one's, so that the difference may end with that
        if first is not None and start < stop and int(tokens[stop - 1]) > first.stop:
            return False
        behind = start == len(tokens) or int(tokens[start]) > first.stop if first else False
        if behind and start == stop and start > side.head + 1:
            return False
    return True


def _before_response(pair: Pair, left: TextCut, right: TextCut) -> bool:
    """Whether one side has more text, directly before a response and within its turn: a generation prompt."""
    cuts = (left, right)
    if all(a < b for a, b in cuts):
        return False
    if not all(
        b < len(loss) and loss[b] for loss, (_, b) in zip(pair.text_loss, cuts, strict=True)
    ):
        return False
    longer = 0 if left[0] < left[1] else 1
    side, tokens, (start, _) = pair.sides[longer], pair.text_tokens[longer], cuts[longer]
    return prompt_of_response(side, int(tokens[start])) and not side.observed[tokens[start]]
