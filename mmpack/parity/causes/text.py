"""Words that differ: prompts and observations (chat_template), responses (retokenized_response, stop_token).

Words are compared with placeholders taken out, so that pictures of other sizes don't count as other text.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmpack.parity.causes.pair import (
    Decode,
    Hit,
    Pair,
    Side,
    common_prefix,
    intervals,
    possible,
    show,
    show_ids,
    stamp_of,
)
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.sample import RESPONSE_TEXT_KEY

_ANOTHER = "response ids and their text differ: this is another response"
Cut = tuple[int, int]  # a half-open run of words


def text_hits(pair: Pair, media: list[Hit], decode: Decode | None) -> list[Hit]:
    """One hit for each kind of text that differs; none if all words are equal, or follow from the hits of `media`."""
    return _markers(pair) + _words(pair, media, decode)


def _markers(pair: Pair) -> list[Hit]:
    if not pair.other_markers:
        return []
    fenced = pair.sides[0] if True in pair.left.markers[1] else pair.sides[1]
    first, _, i = pair.left.showings[0]
    at = pair.left.markers[0][0] if fenced is pair.left else stamp_of(first)
    told = "vision start and end around the video", "none around it"
    left, right = told if fenced is pair.left else told[::-1]
    evidence = f"vision start and end stand around all of media[{i}] in {fenced.name} alone"
    return [Hit("video_markers", "input_ids", evidence, left, right, at, at=at)]


def _words(pair: Pair, media: list[Hit], decode: Decode | None) -> list[Hit]:
    prefix, suffix = pair.common
    n, m = (len(ids) for ids in pair.word_ids)
    if prefix == n == m:
        return []
    left, right = (prefix, n - suffix), (prefix, m - suffix)
    inside = np.concatenate([pair.word_loss[0][slice(*left)], pair.word_loss[1][slice(*right)]])
    if not inside.any() and _timestamp(pair, media, left, right):
        return []
    if not inside.any():
        return [_prompt(pair, left, right)]
    if inside.all():
        return [_response(pair, left, right, decode)]
    return _by_turn(pair, media, decode)


def _timestamp(pair: Pair, media: list[Hit], left: Cut, right: Cut) -> bool:
    """Whether the cuts lie in the timestamp before a video of which `media` says that its frames or seconds differ.

    Or that it may be another video.
    """
    if not any(
        hit.cause
        in ("fps_missing", "video_reader", "video_metadata", "frame_sampling", "timestamp_rounding")
        or (hit.cause == UNKNOWN and hit.index in pair.left.films)
        for hit in media
    ):
        return False
    for side, words, (a, b) in zip(pair.sides, pair.words, (left, right), strict=True):
        start, stop = (int(words[k]) if k < len(words) else len(side) for k in (a, b))
        if not any(stamp_of(f) <= start and stop < f for f, _, _ in side.showings):
            return False
    return True


def _by_turn(pair: Pair, media: list[Hit], decode: Decode | None) -> list[Hit]:
    """Text and responses differ: compare them in turn, words between loss spans and words in them."""
    turns = [intervals(mask) for mask in pair.word_loss]
    if len(turns[0]) != len(turns[1]):
        prefix, suffix = pair.common
        left, right = (prefix, len(pair.words[0]) - suffix), (prefix, len(pair.words[1]) - suffix)
        seen = f"text and loss spans differ: {len(turns[0])} against {len(turns[1])} loss spans; "
        causes = possible("chat_template", "retokenized_response", "stop_token", "loss_mask_shift")
        return [_hit(pair, UNKNOWN, left, right, seen + causes)]
    prompts: list[Hit] = []
    responses: list[Hit] = []
    ends = [0, 0]
    for k in range(len(turns[0]) + 1):
        spans = [
            t[k] if k < len(t) else (len(w), len(w)) for t, w in zip(turns, pair.words, strict=True)
        ]
        cut = _cut(pair, [(end, span[0]) for end, span in zip(ends, spans, strict=True)])
        if cut and not _timestamp(pair, media, *cut):
            prompts.append(_prompt(pair, *cut))
        if cut := _cut(pair, spans):
            responses.append(_response(pair, *cut, decode))
        ends = [span[1] for span in spans]
    return _first_of_each(prompts) + _first_of_each(_one_of_many(responses))


def _one_of_many(responses: list[Hit]) -> list[Hit]:
    """One hash stands for the text of all responses: where several differ, it says nothing of each."""
    if len(responses) == 1:
        return responses
    told = f"one of {len(responses)} responses whose ids differ; {possible('retokenized_response')}"
    return [replace(h, evidence=told) if h.evidence == _ANOTHER else h for h in responses]


def _first_of_each(hits: list[Hit]) -> list[Hit]:
    first: dict[str, Hit] = {}
    for hit in hits:
        first.setdefault(hit.cause, hit)
    return list(first.values())


def _cut(pair: Pair, spans: list[Cut]) -> tuple[Cut, Cut] | None:
    """The part of two runs of words in which they differ; None if they are equal."""
    a, b = (ids[slice(*span)] for ids, span in zip(pair.word_ids, spans, strict=True))
    prefix = common_prefix(a, b)
    if prefix == len(a) == len(b):
        return None
    rest = min(len(a), len(b)) - prefix
    suffix = common_prefix(a[len(a) - rest :][::-1], b[len(b) - rest :][::-1])
    (left, _), (right, _) = spans
    return (left + prefix, spans[0][1] - suffix), (right + prefix, spans[1][1] - suffix)


def _prompt(pair: Pair, left: Cut, right: Cut) -> Hit:
    hashes = [side.setting("chat_template") for side in pair.sides]
    if None not in hashes and hashes[0] != hashes[1]:
        evidence = f"processor.chat_template: rollout {show(hashes[0])}, train {show(hashes[1])}"
        return _hit(pair, "chat_template", left, right, evidence)
    if None in hashes:
        evidence = (
            f"text outside the loss spans differs; no template hash; {possible('chat_template')}"
        )
        return _hit(pair, UNKNOWN, left, right, evidence)
    if _system_turn(pair, left, right) or _before_response(pair, left, right):
        evidence = (
            "one template hash on both sides, the turn before the first medium's, or the text right "
            "before the response, differs: the system prompt, tools or generation prompt handed to it do"
        )
        return _hit(pair, "chat_template", left, right, evidence)
    evidence = (
        f"text outside the loss spans differs under one template; {possible('chat_template')}"
    )
    return _hit(pair, UNKNOWN, left, right, evidence)


def _system_turn(pair: Pair, left: Cut, right: Cut) -> bool:
    """Whether the difference ends with the turn before the first medium's, which is the first, or absent on one side.

    Two of the user's turns don't follow each other, so that it is no user's. Turns open with the special id that opens
    the sample; without recorded `special_ids` none are known.
    """
    for side, words, ids, (start, stop) in zip(
        pair.sides, pair.words, pair.word_ids, (left, right), strict=True
    ):
        if not len(side.runs) or not len(ids) or ids[0] not in _special_ids(side):
            return False
        opens = np.flatnonzero((ids == ids[0]) & (words < side.runs.starts[0]))
        if len(opens) not in (1, 2) or (len(opens) == 1 and start < stop):
            return False
        if len(opens) == 2 and stop > opens[1] + 1:
            return False
    return True


def _special_ids(side: Side) -> set[int]:
    special = side.setting("tokenizer", "special_ids")
    return (
        {i for i in special.values() if isinstance(i, int)} if isinstance(special, dict) else set()
    )


def _before_response(pair: Pair, left: Cut, right: Cut) -> bool:
    """Whether one side alone has more words, directly before a response: a generation prompt."""
    cuts = (left, right)
    if all(a < b for a, b in cuts):
        return False
    return all(b < len(loss) and loss[b] for loss, (_, b) in zip(pair.word_loss, cuts, strict=True))


def _response(pair: Pair, left: Cut, right: Cut, decode: Decode | None) -> Hit:
    if same_text(pair, decode, left, right):
        evidence = "other ids, same text: " + (
            "decoded and compared" if decode else f"equal metadata.{RESPONSE_TEXT_KEY}"
        )
        return _hit(pair, "retokenized_response", left, right, evidence)
    if stop := _stop_token(pair, left, right):
        return stop
    texts = _texts(pair, decode, left, right)
    if None in texts:
        causes = possible("retokenized_response", "stop_token")
        evidence = (
            f"response ids differ, no text to compare: no metadata.{RESPONSE_TEXT_KEY}; {causes}"
        )
    elif texts[0] != texts[1]:
        evidence = _ANOTHER
    elif left[0] == left[1] or right[0] == right[1]:
        evidence = "response ids differ by ids that one side lacks, under one text"
    else:
        evidence = (
            "response ids differ, and their text can't tell them apart: it is empty, lacks some ids "
            f"or holds U+FFFD; {possible('retokenized_response')}"
        )
    return _hit(pair, UNKNOWN, left, right, evidence)


def same_text(pair: Pair, decode: Decode | None, left: Cut, right: Cut) -> bool:
    """Whether the responses that hold the cuts are known to be one text; by its hash, all responses are.

    Ids that one side lacks are no other ids of one text: the text lacks them too, or belongs to the other side. Neither
    are ids that decode to nothing, or to U+FFFD, which stands for any bytes that are no character.
    """
    if left[0] == left[1] or right[0] == right[1]:
        return False
    texts = _texts(pair, decode, left, right)
    if texts[0] != texts[1] or not isinstance(texts[0], str):
        return False
    if decode is None:
        return True
    shown = [
        [i for i in ids[slice(*cut)].tolist() if decode([i])]
        for ids, cut in zip(pair.word_ids, (left, right), strict=True)
    ]
    return bool(texts[0]) and "\ufffd" not in texts[0] and shown[0] != shown[1]


def _texts(pair: Pair, decode: Decode | None, left: Cut, right: Cut) -> list[str | None]:
    """Of each side, the response that holds the cut, decoded; without `decode` the hash of all responses' text."""
    if decode is None:
        return [side.sample.metadata.get(RESPONSE_TEXT_KEY) for side in pair.sides]
    return [
        decode(side.ids[words][slice(*_turn(loss, cut))].tolist())
        for side, words, loss, cut in zip(
            pair.sides, pair.words, pair.word_loss, (left, right), strict=True
        )
    ]


def _turn(loss: np.ndarray, cut: Cut) -> Cut:
    """The run of loss words that touches a cut."""
    touching = [(a, b) for a, b in intervals(loss) if a <= cut[1] and cut[0] <= b]
    return touching[0] if touching else cut


def _stop_token(pair: Pair, left: Cut, right: Cut) -> Hit | None:
    """One side has one id more at the end of a response."""
    sizes = (left[1] - left[0], right[1] - right[0])
    if sorted(sizes) != [0, 1]:
        return None
    longer = sizes.index(1)
    start, stop = (left, right)[longer]
    loss = pair.word_loss[longer]
    if stop < len(loss) and loss[stop]:
        return None
    token = int(pair.word_ids[longer][start])
    reasons = [side.sample.finish_reason for side in pair.sides]
    evidence = (
        f"id {token} ends the response in {pair.sides[longer].name} alone; "
        f"finish_reason: rollout {reasons[0]}, train {reasons[1]}"
    )
    special = _special_ids(pair.sides[longer])
    if special and token not in special:
        return _hit(pair, UNKNOWN, left, right, f"{evidence}; it is no special token")
    if "stop" in reasons:
        return _hit(pair, "stop_token", left, right, evidence)
    return _hit(pair, UNKNOWN, left, right, f"{evidence}; {possible('stop_token')}")


def _hit(pair: Pair, cause: str, left: Cut, right: Cut, evidence: str) -> Hit:
    words = pair.words[0]
    start = int(words[left[0]]) if left[0] < len(words) else len(pair.left)
    stop = int(words[left[1] - 1]) + 1 if left[0] < left[1] else start
    return Hit(
        cause=cause,
        field="input_ids",
        evidence=evidence,
        left=show_ids(pair.word_ids[0][slice(*left)]),
        right=show_ids(pair.word_ids[1][slice(*right)]),
        index=start,
        span=(start, stop),
        at=start,
    )
