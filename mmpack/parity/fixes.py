"""The causes that parity can name, in the order in which a pipeline runs into them, and what to do about each.

All is in `explained.md`: a section per cause, with its fix below the title. A cause that stands earlier there is the
root of those after it: `first` of a report follows this order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

UNKNOWN = "unknown"
_TEXT = (Path(__file__).parent / "explained.md").read_text(encoding="utf-8")
FIXES: dict[str, str] = dict(re.findall(r"^# ([a-z_]+): .*\n\nFix: (.*)$", _TEXT, re.MULTILINE))
RANK = {cause: rank for rank, cause in enumerate(FIXES)}

# causes that the smoke test can put into a train side on purpose
Injected = Literal[
    "max_pixels",
    "double_expansion",
    "sampled_placeholder",
    "retokenized_response",
    "padding_positions",
    "loss_mask_shift",
    "dropped_image",
    "chat_template",
]
