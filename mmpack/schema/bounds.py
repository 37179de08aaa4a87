"""How much a trace may decode to: a small file must not cost much work or memory."""

from __future__ import annotations

import re

from mmpack.schema.error_text import trace_error

MAX_RECORDS = 32  # a file of any size may decode to this many records of the largest size
# or to this many times its own bytes: JSON compresses 10 to 100 times, equal samples more
EXPANSION = 1024
# Objects, lists and keys are slow to parse, and `[],` is three bytes: the most of a record, or one per ITEM_BYTES
MAX_ITEMS, ITEM_BYTES = 2**20, 32
STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class Total:
    """Counts what a compressed trace decodes to, as it comes."""

    def __init__(self, file_bytes: int, max_record_bytes: int):
        self.file_bytes = file_bytes
        self.limit = max(MAX_RECORDS * max_record_bytes, EXPANSION * file_bytes)
        self.bytes = self.items = 0

    def add(self, count: int, where: str) -> None:
        """Count bytes. Raises TraceError (MM010) at `where` if it is too much."""
        self.bytes += count
        if self.bytes > self.limit:
            why = f"decodes to more than {self.limit} bytes, the file has {self.file_bytes}"
            raise trace_error(where, why, "MM010")

    def add_items(self, count: int, where: str) -> None:
        """Count objects, lists and keys. Raises as `add` does."""
        self.items += count
        limit = max(MAX_RECORDS * MAX_ITEMS, self.limit // ITEM_BYTES)
        if self.items > limit:
            why = (
                f"the file has more than {limit} objects, lists and keys in {self.file_bytes} bytes"
            )
            raise trace_error(where, why, "MM010")


def checked_items(text: str, max_record_bytes: int, where: str) -> int:
    """How many objects, lists and keys a JSON text has, or a few more. Raises TraceError (MM010) at `where`."""
    limit = max(MAX_ITEMS, max_record_bytes // ITEM_BYTES)
    count = sum(map(text.count, "[{:"))
    if count > limit:
        count = sum(map(STRING.sub("", text).count, "[{:"))
    if count > limit:
        raise trace_error(where, f"has more than {limit} objects, lists and keys", "MM010")
    return count
