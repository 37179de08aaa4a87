"""What callers hand to a processor, checked where it enters: ids, logprobs, spans, messages, fields of Sample."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, TraceError
from mmpack.schema.error_text import shown
from mmpack.schema.fields import Records
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan

_FIXES = {
    "Score": "[mp.Score(name='accuracy', value=1.0)]",
    "Cost": "[mp.schema.Cost(name='harm', value=1.0)]",
}
_OF_TEMPLATES = (
    *("tools", "documents", "enable_thinking"),
    *("add_generation_prompt", "continue_final_message"),
)


def as_ids(ids: Sequence[int] | np.ndarray, limit: int, name: str = "input_ids") -> np.ndarray:
    """int64 [n], each at least 0 and below `limit`, the rows of the vocabulary. Raises: ArgumentError."""
    array = _array(ids, name, "integers [n]")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"processor: {name} has shape {list(array.shape)} and dtype {array.dtype}, expected integers [n]. "
            "Fix: pass token ids"
        )
    odd = np.flatnonzero((array < 0) | (array >= limit))
    if len(odd):
        at = int(odd[0])
        raise ArgumentError(
            f"processor: {name}[{at}] is {array[at]}, the vocabulary has ids from 0 to {limit - 1} ({len(odd)} "
            f"of {len(array)} are outside). Fix: pass ids of this model's tokenizer, without padding or -100"
        )
    return array.astype(np.int64)


def as_logprobs(values: Any, count: int) -> np.ndarray | None:
    """float32 [count], finite. Raises: ArgumentError."""
    if values is None:
        return None
    array = _array(values, "rollout_logprobs", "numbers", np.float32)
    if array.shape != (count,):
        raise ArgumentError(
            f"processor: rollout_logprobs has shape {list(array.shape)}, expected [{count}]. "
            "Fix: pass one value for each sampled token"
        )
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ArgumentError(
            f"processor: rollout_logprobs[{bad[0]}] is {array[bad[0]]}. "
            "Fix: pass the engine's logprob of the sampled token, a finite number"
        )
    return array


def as_spans(spans: Any, length: int) -> list[LossSpan]:
    """LossSpans within `length` ids, of LossSpans or (start, stop). Raises: ArgumentError, LayoutError (MM201)."""
    out = []
    for i, span in enumerate(_items(spans, "loss_spans", "(start, stop)")):
        pair = isinstance(span, (tuple, list)) and len(span) == 2
        s = LossSpan(span[0], span[1], turn=0) if pair else span
        whole = isinstance(s, LossSpan) and all(
            isinstance(edge, (int, np.integer)) for edge in (s.start, s.stop)
        )
        if not whole:
            raise ArgumentError(
                f"processor: loss_spans[{i}] is {shown(span)}, expected (start, stop). "
                "Fix: pass pairs of token indices, or LossSpans"
            )
        if not 0 <= s.start <= s.stop <= length:
            raise LayoutError(
                f"processor: loss_spans[{i}] [{s.start}, {s.stop}) is out of range: there are {length} ids. "
                "Fix: count tokens in the ids that you pass",
                "MM201",
                (s.start, s.stop),
            )
        out.append(s)
    return out


def check_messages(messages: Any) -> None:
    """Raise ArgumentError for what is no list of chat messages."""
    fix = 'Fix: pass messages=[{"role": "user", "content": …}]'
    for i, message in enumerate(_items(messages, "messages", "chat messages", fix)):
        where = f"processor: messages[{i}]"
        if isinstance(message, (list, tuple)):
            raise ArgumentError(
                f"{where} is a conversation, expected a message. Fix: call the processor once per conversation"
            )
        if not isinstance(message, dict):
            raise ArgumentError(f"{where} is {type(message).__name__}, expected an object. {fix}")
        if not isinstance(message.get("role"), str):
            raise ArgumentError(f"{where} has no role. {fix}")
        content = message.get("content")
        empty = content is None and not message.get("tool_calls")
        if empty or not isinstance(content, (str, list, tuple, type(None))):
            odd = next((n for n in message if n not in ("role", "content", "tool_calls")), None)
            beside = "" if odd is None or "content" in message else f" and {odd!r:.40} instead"
            raise ArgumentError(
                f"{where} has the content {shown(content)}{beside}, expected a str or a list of parts. {fix}"
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, (list, tuple)) or not all(isinstance(c, Mapping) for c in calls):
            raise ArgumentError(
                f"{where} has the tool_calls {shown(calls)}, expected a list of objects. "
                "Fix: pass dicts, as model_dump() makes"
            )
    if not len(messages):
        raise ArgumentError(f"processor: messages is empty. {fix}")


def template_options(given: Any, prompt: bool | None = None) -> dict[str, Any]:
    """Keywords of the chat template. `prompt`: whether a generation prompt must follow; None: as they say.

    Raises: ArgumentError.
    """
    if not isinstance(given, dict | None) or not all(isinstance(k, str) for k in given or ()):
        what = "a dict of other keys" if isinstance(given, dict) else type(given).__name__
        raise ArgumentError(
            f"processor: template_kwargs is {what}, expected names and values. "
            'Fix: pass template_kwargs={"enable_thinking": False}'
        )
    given = given or {}
    for name, own in (("add_generation_prompt", prompt), ("continue_final_message", False)):
        if prompt is not None and bool(given.get(name, own)) != own:
            raise ArgumentError(
                f"processor: {name} of template_kwargs is {shown(given[name])}, but here it follows from what is "
                "trained. Fix: leave it out"
            )
    return given


def check_names(
    given: Iterable[str], known: Sequence[str], what: str, holder: str, templates: bool = False
) -> None:
    """Raise ArgumentError for names that are no fields of `holder`; `known` are those that can be set.

    `templates`: what a chat template reads has an argument of its own.
    """
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        fix = f"write {near[0]}" if near else "leave it out"
        if templates and (name in _OF_TEMPLATES or name.endswith("template_kwargs")):
            fix = 'pass what the chat template reads as template_kwargs={"tools": …}'
        raise ArgumentError(
            f"{what}: {name!r:.40} is not a field of {holder} that you can set. Fix: {fix}"
        )


def check_fields(fields: dict[str, Any]) -> None:
    """Raise ArgumentError for values that a field of Sample can't hold; records must be of their class."""
    for name, value in fields.items():
        if value is None or name == "rollout_logprobs":  # see `as_logprobs`
            continue
        if name in ("sample_id", "group_id") and not isinstance(value, str):
            raise ArgumentError(
                f"processor: {name} is {shown(value)}, expected a str. Fix: pass str({name})"
            )
        spec = Sample.columns()[name].spec
        if isinstance(spec, Records):
            wanted = spec.cls.__name__
            fix = f"Fix: {name}={_FIXES.get(wanted, f'[mp.{wanted}(…)]')}"
            for i, item in enumerate(_items(value, name, wanted, fix)):
                if not isinstance(item, spec.cls):
                    raise ArgumentError(
                        f"processor: {name}[{i}] is {shown(item)}, expected {wanted}. {fix}"
                    )
        try:
            spec.read(spec.write(value, numpy=True), f"processor: {name}")
        except TraceError as error:
            raise ArgumentError(str(error)) from None


def check_lengths(fields: dict[str, Any], count: int, length: int) -> None:
    """Raise ArgumentError for lists that aren't one per loss token (`count`), or routes not of `length` ids."""
    lists = {"kept_ids": fields.get("kept_ids")} | {
        f"teachers[{name!r:.40}]": x for name, x in (fields.get("teachers") or {}).items()
    }
    for name, own in lists.items():
        if own is not None and len(own) != count:
            raise ArgumentError(
                f"processor: {name} has {len(own)} lists for {count} response ids. "
                "Fix: pass one list for each sampled token"
            )
    routes = fields.get("routed_experts")
    if routes is not None and len(routes) != length:
        raise ArgumentError(
            f"processor: routed_experts has routes for {len(routes)} tokens, expected {length}. "
            "Fix: pass one row per token, with pictures expanded; the last row may hold anything"
        )


def items_of(given: Any, name: str) -> list[Any]:
    """A list of media; none for None. Raises: ArgumentError for a single one."""
    return [] if given is None else _items(given, name, "media", f"Fix: {name}=[…]")


def _items(given: Any, name: str, what: str, fix: str | None = None) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        raise ArgumentError(
            f"processor: {name} is {type(given).__name__}, expected a list of {what}. {fix or f'Fix: {name}=[…]'}"
        )
    return list(given)


def _array(values: Any, name: str, what: str, dtype: Any = None) -> np.ndarray:
    try:
        return np.asarray(values, dtype=dtype)
    # ragged lists, texts, a tensor on a GPU
    except (TypeError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())[:120]
        raise ArgumentError(
            f"processor: {name} is not an array of {what} ({why}). Fix: pass a flat list or a numpy array"
        ) from None
