"""Media as rows and requests hold them: `data:` URLs (RFC 2397), base64, cells of `datasets`. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
from typing import Any
from urllib.parse import unquote_to_bytes

from mmpack.errors import ArgumentError

_CELL = {"bytes", "path"}


def check_read(item: dict[str, Any], known: set[str], where: str) -> None:
    """Raise ArgumentError for what an object holds other than `known`."""
    odd = next((name for name in item if name not in known and item[name] is not None), None)
    if odd is not None:
        beside = " and ".join(sorted(known & item.keys()))
        raise ArgumentError(
            f"{where} holds {odd!r:.40} beside {beside}, which is not read. Fix: leave it out, and do what it says "
            "first, for engine and trainer alike"
        )


def is_data_url(item: Any) -> bool:
    return isinstance(item, str) and item[:5].lower() == "data:"


def loaded(item: Any, where: str) -> Any:
    """`item` with the bytes of a `data:` URL in its place, also in a video's pair; all else as it is.

    A cell `{"bytes": …, "path": …}`, as `datasets` has pictures before it decodes them, becomes its bytes, else its
    path.
    Raises: ArgumentError.
    """
    if isinstance(item, dict) and item.keys() & _CELL and "array" not in item:
        check_read(item, _CELL, where)
        item = next((item[name] for name in ("bytes", "path") if item.get(name) is not None), None)
        if item is None:
            raise ArgumentError(f"{where} has neither bytes nor a path. Fix: pass the file's bytes")
    if isinstance(item, (tuple, list)) and item and is_data_url(item[0]):
        return type(item)([loaded(item[0], where), *item[1:]])
    if not is_data_url(item):
        return item
    head, comma, data = item.partition(",")
    if not comma:
        raise ArgumentError(
            f"{where} is a data: URL without a comma. Fix: write it as data:image/png;base64,…"
        )
    if head.lower().startswith("data:video/jpeg") and "," in data:  # as vLLM takes them
        raise ArgumentError(
            f"{where} is a list of JPEGs, whose times nobody knows. "
            'Fix: pass ([pictures], {"fps": …}), each opened by Pillow'
        )
    content = unquote_to_bytes(data)
    return from_base64(content, where) if head.lower().endswith(";base64") else content


def from_base64(text: str | bytes, where: str) -> bytes:
    """Raises: ArgumentError."""
    try:
        raw = text.encode("ascii") if isinstance(text, str) else text
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ArgumentError(
            f"{where} is not base64 ({error}). Fix: encode the file's bytes"
        ) from None
