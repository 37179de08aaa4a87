"""The content parts of chat messages: the media that they hold, in order, and the parts as chat templates know them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.errors import ArgumentError
from mmpack.processors.arguments import check_messages, items_of
from mmpack.processors.data_url import from_base64, is_data_url, loaded
from mmpack.processors.kinds import kind_of_item
from mmpack.video.policies.registry import POLICIES

# what others read next to a medium; here a processor has one way to sample and to resize
_OF_VIDEOS = {name for policy in POLICIES.values() for name in policy.kinds}
_BESIDE = {
    "video": _OF_VIDEOS | {"sample_fps", "raw_fps"},
    "image": {"min_pixels", "max_pixels", "resized_height", "resized_width"},
    "audio": set(),
}
_REMOTE = ("url", "image_url", "video_url", "audio_url", "base64")
KINDS = ("image", "video", "audio")
# types of parts, and the keys that hold a part's medium: what each is; None: the type says it
_TYPES = {name: k for k in KINDS for name in (k, f"{k}_url", f"input_{k}")} | {"image_pil": "image"}
_HOLDERS = {**_TYPES, "url": None, "base64": None, "path": None}
# beside a medium or in its object: names, and hints for other readers of the same part
_NAMES = ("id", "uuid", "detail", "format", "mime_type", "media_type")
# parts that hold a medium, or what became of it, in a form that is not read
_UNREAD = {
    "file": "pass its pages as pictures, or its text",
    "input_file": "pass its pages as pictures, or its text",
    "file_id": 'pass {"type": "image", "image": …} with the bytes of the file',
    "inline_data": 'pass {"type": "KIND", "base64": …} with its data',
    "file_data": 'pass {"type": "image", "image": …} with the bytes of the file',
    "image_embeds": 'pass {"type": "image", "image": …} with the picture itself',
    "audio_embeds": 'pass {"type": "audio", "audio": …} with the sound itself',
}
_INSTEAD = {
    "audio": "cut the sound first, for engine and trainer alike",
    "video": "video_settings of wrap_processor for every video, or (file, mp.video.sample(…)) for this one",
    "image": "settings of the image processor for every picture, or hand over this one resized",
}


def media_of(messages: Sequence[dict[str, Any]], media: Sequence[Any] | None) -> list[Any]:
    """The media of chat messages in order: from the content parts, or from `media` where the parts are bare.

    Raises: ArgumentError.
    """
    return [item for _, item in parts_of(messages, media)]


def parts_of(
    messages: Sequence[dict[str, Any]], media: Sequence[Any] | None
) -> list[tuple[str, Any]]:
    """`media_of`, each with what its part says that it is: `image`, `video`, `audio`, or `sound` (of the video before).

    Raises: ArgumentError.
    """
    check_messages(messages)
    extra = iter(items_of(media, "media"))
    out = []
    for m, message in enumerate(messages):
        content = message.get("content")
        for p, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            where = f"processor: messages[{m}].content[{p}]"
            kind = kind_of_part(part, where)
            if kind is None:
                continue
            _refuse_settings(part, kind, where)
            item = _item_of(part, kind, where)
            if item is None:
                item = loaded(next(extra, None), where)
            if item is None:
                odd = [name for name in plain_part(part, where) if name != "type"]
                beside = f", and {odd[0]!r:.40} is not read" if odd else ""
                raise ArgumentError(
                    f"{where} is of type {kind} but holds no {kind}{beside}. "
                    f'Fix: pass {{"type": "{kind}", "{kind}": …}}, or the {kind} in media='
                )
            found = kind_of_item(item)
            if found not in (kind, None):
                raise ArgumentError(
                    f'{where} is of type {kind}, but what it holds is not. Fix: write {{"type": "{found}", …}}'
                )
            out.append((kind, item))
            if kind == "video" and part.get("audio") is not None:
                out.append(("sound", loaded(part["audio"], where)))
    left = len(list(extra))
    if left:
        raise ArgumentError(
            f"processor: {left} of media= have no part in the messages. "
            'Fix: write one {"type": "image"} or {"type": "video"} part each'
        )
    return out


def kind_of_part(part: Any, where: str) -> str | None:
    """`image`, `video`, `audio`, or None for text. A video part that holds an audio is a video with its sound.

    Raises: ArgumentError for a medium that can't be read, and for more than one.
    """
    if not isinstance(part, dict):
        raise ArgumentError(
            f'{where} is {type(part).__name__}, expected an object. Fix: write one such as {{"type": "text", …}}'
        )
    given = [name for name, value in part.items() if value is not None]
    for name, fix in _UNREAD.items():
        if name in given or part.get("type") == name:
            fix = fix.replace("KIND", _kind_of_mime(part[name])) if name in given else fix
            raise ArgumentError(f"{where} holds {name!r}, which mmpack can't read. Fix: {fix}")
    kind = _TYPES.get(str(part.get("type")))
    held = [name for name in given if name in _HOLDERS]
    if kind is None:
        kinds = [
            _HOLDERS[name] or "image" for name in held if _HOLDERS[name] or not part.get("type")
        ]
        if not kinds:
            return None
        kind = "video" if "video" in kinds else kinds[0]
    media = [name for name in held if kind != "video" or _HOLDERS[name] != "audio"]
    if len(media) > 1 or any(_HOLDERS[name] not in (None, kind) for name in media):
        raise ArgumentError(
            f"{where} of type {part.get('type')!r:.40} holds {' and '.join(map(repr, media))}. "
            "Fix: write one part for each medium, of its type"
        )
    remote = next((name for name in media if name in _REMOTE), None)
    if remote is not None and _text_of_bytes(part) is None:
        what = "the picture, its " if kind == "image" else "its "
        raise ArgumentError(
            f"{where} has a {remote!r}, and mmpack fetches nothing. "
            f'Fix: pass {{"type": "{kind}", "{kind}": …}} with {what}bytes or a path below media_root'
        )
    return kind


def _kind_of_mime(held: Any) -> str:
    mime = held.get("mime_type") if isinstance(held, Mapping) else None
    kind = str(mime).partition("/")[0]
    return kind if kind in KINDS else "image"


def plain_messages(messages: Sequence[dict[str, Any]], decode: bool = True) -> list[dict[str, Any]]:
    """`messages` as templates know them: parts bare of their media, and no key without content.

    `decode`: the arguments of tool calls that are an object's JSON become the object, if it says the same.
    """
    return [_plain_message(m, f"processor: messages[{i}]", decode) for i, m in enumerate(messages)]


def _plain_message(message: dict[str, Any], where: str, decode: bool) -> dict[str, Any]:
    empty = {
        name for name, v in message.items() if v is None or (isinstance(v, (list, tuple)) and not v)
    }
    out = {name: v for name, v in message.items() if name == "content" or name not in empty}
    if isinstance(out.get("content"), (list, tuple)):
        parts = enumerate(out["content"])
        out["content"] = [plain_part(part, f"{where}.content[{p}]") for p, part in parts]
    if out.get("tool_calls"):
        out["tool_calls"] = [_plain_call(call, decode) for call in out["tool_calls"]]
    return out


def plain_part(part: Any, where: str) -> dict[str, Any]:
    """`part` with its type in place of its medium; what else it holds stays."""
    kind = kind_of_part(part, where)
    known = {name: value for name, value in part.items() if value is not None}
    if kind is None:
        return known
    rest = {k: v for k, v in known.items() if k not in _HOLDERS and k not in (*_NAMES, "type")}
    return {"type": kind, **rest}


def _plain_call(call: Mapping[str, Any], decode: bool) -> dict[str, Any]:
    """OpenAI writes the arguments of a call as JSON text; templates write an object as JSON themselves."""
    call = {name: value for name, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _plain_call(call["function"], decode)}
    if decode and isinstance(call.get("arguments"), str):
        try:
            arguments = json.loads(
                call["arguments"], object_pairs_hook=_each_once, parse_float=_finite
            )
        except (ValueError, RecursionError):
            return call  # as the model wrote it
        if isinstance(arguments, dict):
            call["arguments"] = arguments
    return call


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key comes twice")
    return out


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError("a number beyond floats")
    return value


def _item_of(part: dict[str, Any], kind: str, where: str) -> Any:
    """The medium that a part holds, decoded where it is text; None if it holds none. Raises: ArgumentError."""
    text = _text_of_bytes(part)
    if text is None:
        held = (kind, "path", *(name for name, what in _HOLDERS.items() if what == kind))
        return loaded(next((part[n] for n in held if part.get(n) is not None), None), where)
    return loaded(text, where) if is_data_url(text) else from_base64(text, where)


def _text_of_bytes(part: dict[str, Any]) -> str | bytes | None:
    """The `data:` URL or `base64` of a part that holds bytes as text; None if it doesn't."""
    heard = part.get("input_audio")
    if isinstance(heard, dict) and isinstance(heard.get("data"), (str, bytes)):
        return heard["data"]
    given = next((part[name] for name in _REMOTE if part.get(name) is not None), None)
    if isinstance(given, dict):
        # {"image_url": {"url": …}}
        given = given.get("url")
    in_base64 = part.get("base64") is not None and isinstance(given, (str, bytes))
    return given if in_base64 or is_data_url(given) else None


def _refuse_settings(part: dict[str, Any], kind: str, where: str) -> None:
    """Raise ArgumentError for what a part, or the object that holds its URL or data, asks for in vain."""
    odd = [name for name in part if name in _BESIDE[kind] and part[name] is not None]
    details = [part.get("detail")]
    for name, held in part.items():
        own = "data" if name == "input_audio" else "url"
        if name in _HOLDERS and isinstance(held, Mapping) and held.get(own) is not None:
            odd += [k for k, v in held.items() if k not in (own, *_NAMES) and v is not None]
            details.append(held.get("detail"))
    if odd:
        fix = _INSTEAD[kind] if odd[0] in _BESIDE[kind] or kind == "audio" else "leave it out"
        raise ArgumentError(
            f"{where} has {odd[0]!r:.40} beside the {kind}, which is not read here. Fix: {fix}"
        )
    asked = [detail for detail in details if detail not in (None, "auto")]
    if asked:
        raise ArgumentError(
            f"{where} has the detail {asked[0]!r:.40}, which is not read here. "
            f"Fix: leave it out, or use {_INSTEAD[kind]}"
        )
