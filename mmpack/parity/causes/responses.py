"""Responses that differ: encoded again, written again, their end cut; or another response.

Cuts count text tokens: all but placeholders. A text is known through `decode`, else only by its hash, which says only
whether all responses of a sample are the same, and whether it is of the ids that the sample holds.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from mmpack.layout.fingerprint import ids_mark
from mmpack.layout.runs import true_runs
from mmpack.parity.causes.pair import (
    LIMIT_OR_STOP,
    Decode,
    Hit,
    Pair,
    Side,
    possible,
    show_ids,
)
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.sample import RESPONSE_TEXT_KEY

TextCut = tuple[int, int]  # a half-open run of text tokens
TextCuts = tuple[TextCut, TextCut]
ANOTHER = "response ids and their text differ: this is another response"
_BY_HASH = "response ids and the hash of their text differ"
_THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
_THINK, _THOUGHT_OVER = "<think>", "</think>"


def response_hits(pair: Pair, left: TextCut, right: TextCut, decode: Decode | None) -> list[Hit]:
    """Return what was done to the response that holds the two cuts: one hit, or a stop token and one hit."""
    if same_text(pair, decode, left, right):
        evidence = "other ids, same text: " + (
            "decoded and compared" if decode else f"equal metadata.{RESPONSE_TEXT_KEY}"
        )
        return [text_hit(pair, "retokenized_response", left, right, evidence)]
    if stop := _stop_token(pair, left, right):
        return [stop]
    stop, cuts = _stops(pair, left, right)
    rest = _rest(pair, cuts, decode, stop is not None)
    if stop is None:
        return [rest]
    if rest.cause != UNKNOWN:
        return [stop, rest]
    evidence = f"{rest.evidence}; {stop.evidence}"
    if "stop_token" not in evidence:
        evidence += f"; {possible('stop_token')}"
    # another response has an end of its own
    return [text_hit(pair, UNKNOWN, left, right, evidence)]


def one_of_many(responses: list[Hit]) -> list[Hit]:
    """One hash stands for the text of all responses: where several differ, it says nothing of each."""
    if len(responses) == 1:
        return responses
    evidence = f"one of {len(responses)} responses whose ids differ; {_possible()}"
    return [
        replace(h, evidence=evidence) if h.evidence.startswith(_BY_HASH) else h for h in responses
    ]


def same_text(pair: Pair, decode: Decode | None, left: TextCut, right: TextCut) -> bool:
    """Whether the responses that hold the cuts are known to be one text; by its hash, all responses are.

    Ids that one side lacks are no other ids of one text: the text lacks them too, or belongs to the other side. Neither
    are ids that decode to nothing, or to U+FFFD, which stands for any bytes that are no character.
    """
    if left[0] == left[1] or right[0] == right[1]:
        return False
    texts = _texts(pair, decode, left, right)
    if texts[0] != texts[1] or not isinstance(texts[0], str):
        return False
    return decode is None or _other_ids(pair, decode, left, right, texts[0])


def _other_ids(pair: Pair, decode: Decode, left: TextCut, right: TextCut, text: str) -> bool:
    shown = [
        [i for i in ids[slice(*cut)].tolist() if decode([i])]
        for ids, cut in zip(pair.text_ids, (left, right), strict=True)
    ]
    return bool(text) and "\ufffd" not in text and shown[0] != shown[1]


def _rest(pair: Pair, cuts: TextCuts, decode: Decode | None, has_stop: bool) -> Hit:
    """Return the hit of what differs other than the stop token."""
    left, right = cuts
    if has_stop and decode and same_text(pair, _without_special(pair, decode), left, right):
        evidence = "other ids, same text except for the stop token: decoded and compared"
        return text_hit(pair, "retokenized_response", left, right, evidence)
    if thought := _stripped_thought(pair, left, right):
        return text_hit(pair, "rewritten_response", left, right, thought)
    if decode and (has_stop or _one_end(pair, left, right)):
        written = _texts(pair, _without_special(pair, decode), left, right)
        if how := _rewritten(str(written[0]), str(written[1])):
            return text_hit(pair, "rewritten_response", left, right, how)
    texts = _texts(pair, decode, left, right)
    shorter = _shorter(pair, left, right)
    if shorter is not None:
        return _cut_short(pair, cuts, shorter)
    if None in texts:
        lacks = f"no metadata.{RESPONSE_TEXT_KEY} of both sides' ids"
        evidence = f"response ids differ, no text to compare: {lacks}; {_possible()}"
    elif texts[0] != texts[1] and decode:
        evidence = ANOTHER
    elif texts[0] != texts[1]:
        evidence = (
            f"{_BY_HASH}: another response, or one that was cut or written again; {_possible()}"
        )
    elif left[0] == left[1] or right[0] == right[1]:
        evidence = "response ids differ by ids that one side lacks, with equal text"
    else:
        evidence = (
            "response ids differ, and their text can't say how: it is empty, lacks some ids "
            f"or holds U+FFFD; {possible('retokenized_response')}"
        )
    return text_hit(pair, UNKNOWN, left, right, evidence)


def _possible() -> str:
    return possible("retokenized_response", "rewritten_response", "stop_token")


# ---- how a response ends -------------------------------------------------------------------------


def _stop_token(pair: Pair, left: TextCut, right: TextCut) -> Hit | None:
    """One side has one id more at the end of a response, or another special one."""
    sizes = (left[1] - left[0], right[1] - right[0])
    cuts = (left, right)
    if sizes == (1, 1) and all(_at_end(pair, k, cuts[k]) for k in (0, 1)):
        ids = [int(pair.text_ids[k][cuts[k][0]]) for k in (0, 1)]
        if all(i in side.special_ids for i, side in zip(ids, pair.sides, strict=True)):
            evidence = f"the response ends with id {ids[0]} in rollout, {ids[1]} in train, both special tokens"
            return text_hit(pair, "stop_token", left, right, evidence)
    if sorted(sizes) != [0, 1]:
        return None
    longer = sizes.index(1)
    if not _at_end(pair, longer, cuts[longer]):
        return None
    token = int(pair.text_ids[longer][cuts[longer][0]])
    reasons = [side.sample.finish_reason for side in pair.sides]
    evidence = (
        f"id {token} ends the response only in {pair.sides[longer].name}; "
        f"finish_reason: rollout {reasons[0]}, train {reasons[1]}"
    )
    special = pair.sides[longer].special_ids
    if special and token not in special:
        evidence += f"; it is not a special token; {possible('truncated', 'stop_token')}"
        return text_hit(pair, UNKNOWN, left, right, evidence)
    if "stop" in reasons and "length" not in reasons:
        return text_hit(pair, "stop_token", left, right, evidence)
    if (reasons[longer], reasons[1 - longer]) == ("stop", "length"):
        return text_hit(pair, "truncated", left, right, evidence)
    return text_hit(
        pair, UNKNOWN, left, right, f"{evidence}; {possible('stop_token', 'truncated')}"
    )


def _stops(pair: Pair, left: TextCut, right: TextCut) -> tuple[Hit | None, TextCuts]:
    """The stop token, where other ids before it differ too and only one side ends with a special id; and the rest."""
    ends = [_turn(loss, cut)[1] for loss, cut in zip(pair.text_loss, (left, right), strict=True)]
    last = [_before(ids, end) for ids, end in zip(pair.text_ids, ends, strict=True)]
    special = [i in side.special_ids for i, side in zip(last, pair.sides, strict=True)]
    reasons = [side.sample.finish_reason for side in pair.sides]
    sizes = (left[1] - left[0], right[1] - right[0])
    if special[0] == special[1] or "stop" not in reasons or "length" in reasons or min(sizes) == 0:
        return None, (left, right)
    longer = special.index(True)
    if (left, right)[longer][1] != ends[longer]:
        return None, (left, right)
    evidence = (
        f"id {last[longer]} ends the response only in {pair.sides[longer].name}, other ids differ too; "
        f"finish_reason: rollout {reasons[0]}, train {reasons[1]}"
    )
    stop = [(end - (k == longer), end) for k, end in enumerate(ends)]
    cuts = [(a, b - (k == longer)) for k, (a, b) in enumerate((left, right))]
    return text_hit(pair, "stop_token", stop[0], stop[1], evidence), (cuts[0], cuts[1])


def _before(ids: np.ndarray, end: int) -> int | None:
    """The id before `end`, if there is one."""
    return int(ids[end - 1]) if end else None


def _one_end(pair: Pair, left: TextCut, right: TextCut) -> bool:
    """Whether both responses end with one special id, or with none."""
    ends = []
    for side, ids, loss, cut in zip(
        pair.sides, pair.text_ids, pair.text_loss, (left, right), strict=True
    ):
        last = _before(ids, _turn(loss, cut)[1])
        ends.append(last if last in side.special_ids else None)
    return ends[0] == ends[1]


def _at_end(pair: Pair, k: int, cut: TextCut) -> bool:
    """Whether a cut ends with a response."""
    loss = pair.text_loss[k]
    return cut[1] >= len(loss) or not loss[cut[1]]


def _shorter(pair: Pair, left: TextCut, right: TextCut) -> int | None:
    """The side whose response is the beginning of the other's; None if neither is."""
    for k, cut in enumerate((left, right)):
        if cut[0] == cut[1] and _at_end(pair, 1 - k, (left, right)[1 - k]):
            return k
    return None


def _cut_short(pair: Pair, cuts: TextCuts, shorter: int) -> Hit:
    """A response that is the beginning of the other's: cut at a limit, if nothing speaks of a stop."""
    (a, b), (c, d) = cuts
    reasons = [side.sample.finish_reason for side in pair.sides]
    evidence = (
        f"{pair.sides[shorter].name}'s response ends {abs(b - a - d + c)} ids earlier, "
        f"finish_reason: rollout {reasons[0]}, train {reasons[1]}"
    )
    last = all(cut[1] == len(tokens) for cut, tokens in zip(cuts, pair.text_tokens, strict=True))
    ended = int(pair.text_ids[1 - shorter][cuts[1 - shorter][1] - 1])
    if last and "length" in reasons:
        return text_hit(pair, "truncated", *cuts, evidence)
    whole = last and ended in pair.sides[1 - shorter].special_ids
    cause = "truncated" if whole else UNKNOWN
    return text_hit(pair, cause, *cuts, f"{evidence}: {LIMIT_OR_STOP}")


# ---- a response that was parsed and written again --------------------------------------------------


def _stripped_thought(pair: Pair, left: TextCut, right: TextCut) -> str | None:
    """Only one side has a thought, known by the ids of its marks."""
    for k, cut in enumerate((left, right)):
        side, tokens, ids = pair.sides[k], pair.text_tokens[k], pair.text_ids[k]
        names = side.setting("tokenizer", "special_ids")
        marks = [names.get(n) for n in (_THINK, _THOUGHT_OVER)] if isinstance(names, dict) else []
        start, stop = _turn(pair.text_loss[k], cut)
        other = (left, right)[1 - k]
        if None in marks or not marks or other[0] != other[1] or start > cut[0]:
            continue
        inside = ids[start : cut[1]].tolist()
        if marks[0] in inside[:2] and marks[1] in inside and len(tokens) >= stop:
            return f"only {side.name} has a thought, between ids {marks[0]} and {marks[1]}"
    return None


def _rewritten(one: str, two: str) -> str | None:
    """Say by which change two texts are equal: thoughts left out, JSON read, whitespace; None by none."""
    if not one or not two or one == two or "\ufffd" in one + two:
        return None
    thoughtless = [_THOUGHT.sub("", text) for text in (one, two)]
    thinks = [any(map(str.strip, _THOUGHT.findall(text))) for text in (one, two)]
    if thoughtless[0] == thoughtless[1] and not all(thinks):
        return "equal text, except for a thought that one side lacks"
    if one.split() == two.split():
        return "equal text, except for whitespace"
    read = [_json_of(text) for text in (one, two)]
    if read[0][1] and read[0] == read[1]:
        return "equal text, except for how its JSON is written: spaces, or the order of keys"
    bare = [_json_of(text) for text in thoughtless]
    if bare[0][1] and bare[0] == bare[1] and not all(thinks):
        return "equal text, except for a thought and how its JSON is written"
    return None


def _json_of(text: str) -> tuple[str, list[str]]:
    """The text without its JSON objects and lists, and these, written in one way."""
    reader = json.JSONDecoder(parse_float=_number)
    between, found, at = [], [], 0
    for start in (match.start() for match in re.finditer(r"[{\[]", text)):
        if start < at:
            continue
        try:
            value, stop = reader.raw_decode(text, start)
            written = json.dumps(value, sort_keys=True)
        except (ValueError, RecursionError):
            continue
        between.append(text[at:start])
        found.append(written)
        at = stop
    return " ".join("\0".join([*between, text[at:]]).split()), found


def _number(text: str) -> float:
    """3.0 is 3."""
    value = float(text)
    return int(value) if value.is_integer() else value


# ---- texts ---------------------------------------------------------------------------------------


def _texts(pair: Pair, decode: Decode | None, left: TextCut, right: TextCut) -> list[str | None]:
    """Decode each side's response that holds the cut; without `decode`, return the hash of all responses' text."""
    if decode is None:
        return [_text_hash(side) for side in pair.sides]
    return [
        decode(side.ids[tokens][slice(*_turn(loss, cut))].tolist())
        for side, tokens, loss, cut in zip(
            pair.sides, pair.text_tokens, pair.text_loss, (left, right), strict=True
        )
    ]


def _text_hash(side: Side) -> str | None:
    """The recorded hash of all responses' text; None where it isn't known to be of the side's own ids."""
    text, _, mark = str(side.sample.metadata.get(RESPONSE_TEXT_KEY)).partition("/")
    return text if mark == ids_mark(side.ids[side.loss]) else None


def _without_special(pair: Pair, decode: Decode) -> Decode:
    """Texts without special tokens at their end."""
    special = pair.left.special_ids | pair.right.special_ids

    def text(ids: Any) -> str:
        kept = list(ids)
        while len(kept) > 1 and kept[-1] in special:
            kept.pop()
        return decode(kept)

    return text


def _turn(loss: np.ndarray, cut: TextCut) -> TextCut:
    """The run of loss tokens that touches a cut."""
    touching = [(a, b) for a, b in true_runs(loss) if a <= cut[1] and cut[0] <= b]
    return touching[0] if touching else cut


def text_hit(pair: Pair, cause: str, left: TextCut, right: TextCut, evidence: str) -> Hit:
    """A hit over text tokens that differ."""
    tokens = pair.text_tokens[0]
    start = int(tokens[left[0]]) if left[0] < len(tokens) else len(pair.left)
    stop = int(tokens[left[1] - 1]) + 1 if left[0] < left[1] else start
    cuts = zip(pair.text_ids, (left, right), strict=True)
    one, two = (show_ids(ids[slice(*cut)]) for ids, cut in cuts)
    return Hit(cause, "input_ids", evidence, one, two, start, (start, stop), start)
