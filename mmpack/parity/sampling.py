"""What the logprobs of two sides mean: raw or processed, and under which of the sampler's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmpack.parity.values import same_value

# each with the values that switch it off; none ever switches the temperature off
_OFF: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (None,),
}
SAMPLING_FIELDS = tuple(_OFF)
FILTERS = ("top_p", "top_k", "min_p")
Settings = dict[str, Any] | None


def who_lacks(a: Any, b: Any) -> str:
    """Which side has None, where one has."""
    return "both" if a is None and b is None else "rollout" if a is None else "train"


def unlike_sampling(left: Settings, right: Settings) -> list[str]:
    """The settings by which two sets of logprobs mean different things."""
    a, b = left or {}, right or {}
    kinds = a.get("logprobs"), b.get("logprobs")
    if None in kinds:
        return []
    if kinds[0] != kinds[1]:
        return ["logprobs"]
    if kinds[0] != "processed":
        return []
    return [name for name in SAMPLING_FIELDS if _compared(name, a, b) == "unlike"]


def lacking_sampling(left: Settings, right: Settings, scored: bool) -> Iterator[tuple[str, str]]:
    """What `fields.lacking` gives of `sampling`; `scored`: both sides have the logprobs that it speaks of."""
    a, b = left or {}, right or {}
    kinds = a.get("logprobs"), b.get("logprobs")
    if None in kinds:
        yield "sampling", who_lacks(*kinds)
        return
    if not scored:
        yield "sampling", "unscored"
        return
    if kinds[0] != kinds[1]:
        return
    for name in dict.fromkeys([*a, *b]):
        if name == "logprobs":
            continue
        if kinds[0] == "processed" and name in _OFF:
            who = _compared(name, a, b)
            if who in ("rollout", "train"):
                yield f"sampling.{name}", who
        elif not _same(name, a.get(name), b.get(name)):
            yield f"sampling.{name}", "no_effect" if kinds[0] == "raw" else "unread"


def cuts_ids(settings: Settings) -> bool:
    """Whether a sampler leaves ids out of the softmax that its processed logprobs are of."""
    given = settings or {}
    if given.get("logprobs") != "processed":
        return False
    return any(given.get(name) is not None and not _is_off(name, given) for name in FILTERS)


def _compared(name: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    """same, unlike, or the side (rollout, train) that did not record a setting. Null may be off."""
    x, y = a.get(name), b.get(name)
    off = [_is_off(name, settings) for settings in (a, b)]
    if all(off) or (None not in (x, y) and _same(name, x, y)) or not (name in a or name in b):
        return "same"
    if None in (x, y):
        return "same" if x is y else who_lacks(x, y)
    return "unlike"


def _is_off(name: str, settings: dict[str, Any]) -> bool:
    value = settings.get(name)
    if value is None:
        return name in settings and bool(_OFF[name])
    return any(same_value(value, off) for off in _OFF[name])


def _same(name: str, x: Any, y: Any) -> bool:
    if name == "logit_bias" and isinstance(x, dict) and isinstance(y, dict):
        x, y = ({str(token): bias for token, bias in bias_of.items()} for bias_of in (x, y))
    return same_value(x, y)
