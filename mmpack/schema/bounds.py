"""How much a trace may decode to: a small file must not make a large one of work or memory."""

from __future__ import annotations

from mmpack.schema.fields import fail

MAX_RECORDS = 32  # a file of any size may decode to so many records of the largest size
EXPANSION = (
    1024  # or to so many times its own bytes: JSON compresses 10 to 100 times, equal samples more
)


class Total:
    """Counts the bytes that a compressed trace decodes to, as they come."""

    def __init__(self, file_bytes: int, max_record_bytes: int):
        self.file_bytes = file_bytes
        self.limit = max(MAX_RECORDS * max_record_bytes, EXPANSION * file_bytes)
        self.bytes = 0

    def add(self, count: int, where: str) -> None:
        """Raises TraceError (MM010) at `where` if it is too much."""
        self.bytes += count
        if self.bytes > self.limit:
            why = f"decodes to more than {self.limit} bytes, the file has {self.file_bytes}"
            raise fail(where, why, "MM010")
