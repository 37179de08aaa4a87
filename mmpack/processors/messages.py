"""The media of chat messages, in order of their content parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mmpack.errors import ArgumentError
from mmpack.processors.arguments import check_messages, items_of
from mmpack.processors.data_url import from_base64, is_data_url, loaded
from mmpack.processors.kinds import kind_of_item
from mmpack.video.policies.registry import POLICIES

# what others read beside a medium; here a processor has one way to sample and to resize
_OF_VIDEOS = {f.name for policy in POLICIES.values() for f in fields(policy.settings)}
_BESIDE = {
    "video": _OF_VIDEOS | {"sample_fps", "raw_fps"},
    "image": {"min_pixels", "max_pixels", "resized_height", "resized_width"},
    "audio": set(),
}
_REMOTE = ("url", "image_url", "video_url", "audio_url", "base64")
# parts of OpenAI's that hold a medium and that no chat template knows: it would leave them out without a word
_UNKNOWN = {
    "input_audio": 'pass {"type": "audio", "audio": …} with its bytes, to a family with audio input',
    "file": "pass its pages as pictures, or its text",
    "input_file": "pass its pages as pictures, or its text",
}
_INSTEAD = {
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
                raise ArgumentError(
                    f"{where} is of type {kind} but holds no {kind}. Fix: put it into the part, or pass it in media="
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
    """`image`, `video`, `audio`, or None for text. A video part that holds an audio is a video with its sound."""
    if not isinstance(part, dict):
        raise ArgumentError(
            f'{where} is {type(part).__name__}, expected an object. Fix: write one such as {{"type": "text", …}}'
        )
    remote = [name for name in _REMOTE if name in part]
    if remote or part.get("type") in ("image_url", "video_url", "audio_url"):
        name = (remote or [part["type"]])[0]
        video = any("video" in str(n) for n in (part.get("type"), *part))
        kind, what = ("video", "its ") if video else ("image", "the picture, its ")
        if "audio" in str(part.get("type")) or "audio_url" in part:
            kind, what = "audio", "its "
        if remote and _text_of_bytes(part) is not None:
            return kind
        raise ArgumentError(
            f"{where} has a {name!r}, and mmpack fetches nothing. "
            f'Fix: pass {{"type": "{kind}", "{kind}": …}} with {what}bytes or a path below media_root'
        )
    for kind in ("image", "video", "audio"):
        if part.get("type") == kind or kind in part:
            return kind
    for name, fix in _UNKNOWN.items():
        if part.get("type") == name:
            raise ArgumentError(
                f"{where} is of type {name}, which no chat template reads. Fix: {fix}"
            )
    return None


def plain_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as templates know them: parts of type `image_url` or `video_url` become bare ones."""
    return [
        {**message, "content": [_plain(part) for part in message["content"]]}
        if isinstance(message.get("content"), (list, tuple))
        else message
        for message in messages
    ]


def _plain(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") in ("image_url", "video_url", "audio_url"):
        return {"type": part["type"].removesuffix("_url")}
    if "audio" in part and (part.get("type") == "video" or "video" in part):
        return {"type": "video"}  # templates would write an audio
    return part


def _item_of(part: dict[str, Any], kind: str, where: str) -> Any:
    """The medium that a part holds, decoded where it is text; None if it holds none. Raises: ArgumentError."""
    text = _text_of_bytes(part)
    if text is None:
        return loaded(part.get(kind, part.get("path")), where)
    return loaded(text, where) if is_data_url(text) else from_base64(text, where)


def _text_of_bytes(part: dict[str, Any]) -> str | bytes | None:
    """The `data:` URL or `base64` of a part that holds bytes as text; None if it doesn't."""
    given = next((part[name] for name in _REMOTE if name in part), None)
    if isinstance(given, dict):
        # {"image_url": {"url": …}}
        given = given.get("url")
    in_base64 = "base64" in part and isinstance(given, (str, bytes))
    return given if in_base64 or is_data_url(given) else None


def _refuse_settings(part: dict[str, Any], kind: str, where: str) -> None:
    odd = next((name for name in part if name in _BESIDE[kind] and part[name] is not None), None)
    if odd is not None:
        raise ArgumentError(
            f"{where} has {odd!r} beside the {kind}, which is not read here. Fix: {_INSTEAD[kind]}"
        )
