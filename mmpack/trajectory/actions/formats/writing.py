"""JSON as people write it."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def plain_numbers(value: Any) -> Any:
    """A tree of JSON values with whole floats as integers: 3 and not 3.0, as models write coordinates."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, (list, tuple)):
        return [plain_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: plain_numbers(v) for k, v in value.items()}
    return value


def json_text(value: Any) -> str:
    """JSON on one line, letters as they are; lone surrogates escaped, which no encoding holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
