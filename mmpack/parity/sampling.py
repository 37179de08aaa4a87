"""Meaning of two sides' logprobs: raw or processed, and under which settings of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmpack.parity.causes.pair import Hit, possible, show
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.values import same_value

# settings that change processed logprobs, each with the values that leave them as they are; null is one of these but
# for the temperature, which engines then take from elsewhere
_OFF: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "typical_p": (1, None),
    "epsilon_cutoff": (0, None),
    "eta_cutoff": (0, None),
    "repetition_penalty": (1, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "no_repeat_ngram_size": (0, None),
    "min_tokens": (0, None),
    "min_new_tokens": (0, None),
    "logit_bias": ({}, None),
    "bad_words": ([], None),
    "bad_words_ids": ([], None),
    "suppress_tokens": ([], None),
    "allowed_token_ids": (None,),
}
SAMPLING_FIELDS = tuple(_OFF)
FILTERS = ("top_p", "top_k", "min_p")
Settings = dict[str, Any] | None


def who_lacks(a: Any, b: Any) -> str:
    """Name the side that has None: both, rollout or train."""
    return "both" if a is None and b is None else "rollout" if a is None else "train"


def unlike_sampling(left: Settings, right: Settings, drift: bool = False) -> list[str]:
    """The settings by which two sets of logprobs mean different things, or may; none if either is known as raw.

    One that only one side recorded counts if it is on: an engine fills what a request leaves out from the model's
    generation_config.json. `drift`: such a temperature or filter does not count, since drift shows it; nor where no
    kind is known.
    """
    a, b = left or {}, right or {}
    kinds = a.get("logprobs"), b.get("logprobs")
    if None not in kinds and kinds[0] != kinds[1]:
        return ["logprobs"]
    if "raw" in kinds:
        return []
    known = None not in kinds
    shown = ("temperature", *FILTERS) if drift else ()
    return [
        name
        for name in SAMPLING_FIELDS
        for found in [_compared(name, a, b)]
        if (found == "unlike" and (known or name not in shown))
        or (found == "one-sided" and known and name not in shown)
    ]


def sampling_hit(left: Settings, right: Settings) -> Hit:
    """Why logprobs of two sides mean different things: `unlike_sampling` names settings."""
    names = unlike_sampling(left, right)
    known = None not in [(settings or {}).get("logprobs") for settings in (left, right)]
    pairs = [(_shown(name, left), _shown(name, right)) for name in names]
    evidence = "; ".join(f"sampling.{a} in rollout, {b} in train" for a, b in pairs)
    if "not recorded" in evidence:
        evidence += "; an engine fills what a request leaves out from generation_config.json"
    cause = "logprob_kind" if names[0] == "logprobs" else "sampling"
    if not known:
        evidence += f"; sampling.logprobs (raw or processed) is not recorded; {possible(cause)}"
        cause = UNKNOWN
    return Hit(cause, "sampling", evidence, *pairs[0])


def _shown(name: str, settings: Settings) -> str:
    given = settings or {}
    value = "null" if name in given and given[name] is None else show(given.get(name))
    return f"{name} {value if name in given else 'not recorded'}"


def lacking_sampling(left: Settings, right: Settings, scored: bool) -> Iterator[tuple[str, str]]:
    """Yield entries of `fields.lacking` for `sampling`; `scored`: both sides have the logprobs it describes."""
    a, b = left or {}, right or {}
    kinds = a.get("logprobs"), b.get("logprobs")
    if None in (left, right):
        yield "sampling", who_lacks(left, right)
        return
    if None in kinds:
        yield "sampling.logprobs", who_lacks(*kinds)
        return
    if not scored:
        yield "sampling", "unscored"
        return
    if kinds[0] != kinds[1] or left is right:
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
    """same, unlike, one-sided (on, where one side recorded it), or the side (rollout, train) that lacks one that is
    off, which may be equal.
    """
    off = [_is_off(name, settings) for settings in (a, b)]
    known = [off[k] or settings.get(name) is not None for k, settings in enumerate((a, b))]
    if not any(known) or all(off):
        return "same"
    if all(known):
        return "unlike" if any(off) or not _same(name, a[name], b[name]) else "same"
    if any(off):
        return "train" if known[0] else "rollout"
    return "one-sided"


def _is_off(name: str, settings: dict[str, Any]) -> bool:
    return name in settings and any(same_value(settings[name], off) for off in _OFF[name])


def _same(name: str, x: Any, y: Any) -> bool:
    if name == "logit_bias" and isinstance(x, dict) and isinstance(y, dict):
        x, y = ({str(token): bias for token, bias in bias_of.items()} for bias_of in (x, y))
    return same_value(x, y)
