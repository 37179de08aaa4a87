"""Two Parquet files of one schema: which columns hold the same bytes in both, so that one reading serves both."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from mmpack.schema.parquet_pages import chunk_range, naming_broken, read_footer

PIECE_BYTES = 2**20


class Twins:
    """A trace and another: the row groups that hold the same rows by number. Raises TraceError (MM001)."""

    def __init__(self, path: Path, other: Path) -> None:
        self.where = f"{other}"
        self.files = path.open("rb"), other.open("rb")
        footers = [
            read_footer(f, f"{p}")[1] for f, p in zip(self.files, (path, other), strict=True)
        ]
        with naming_broken(self.where):
            self.groups = [footer.get(4, []) for footer in footers]
            rows = [[group[3] for group in groups] for groups in self.groups]
            unlike = (
                k for k, (mine, theirs) in enumerate(zip(*rows, strict=False)) if mine != theirs
            )
            self.aligned = next(unlike, min(map(len, rows)))
            if footers[0][2] != footers[1][2]:  # the schema
                self.aligned = 0

    def same(self, group: int) -> frozenset[str]:
        """The columns of a row group that are equal in every byte of their pages."""
        if group >= self.aligned:
            return frozenset()
        found: dict[str, bool] = {}
        with naming_broken(self.where):
            for pair in zip(*(groups[group][1] for groups in self.groups), strict=True):
                chunks = [column[3] for column in pair]
                name = chunks[0][3][0].decode("utf-8", "replace")
                found[name] = found.get(name, True) and self._equal(chunks)
        return frozenset(name for name, same in found.items() if same)

    def _equal(self, chunks: list[dict[int, Any]]) -> bool:
        kinds = [[chunk[field] for field in (1, 3, 4, 5)] for chunk in chunks]
        (start, stop), (other, end) = map(chunk_range, chunks)
        if kinds[0] != kinds[1] or stop - start != end - other:  # type, path, codec, values
            return False
        for offset in range(0, stop - start, PIECE_BYTES):
            length = min(PIECE_BYTES, stop - start - offset)
            pieces = []
            for file, at in zip(self.files, (start, other), strict=True):
                file.seek(at + offset)
                pieces.append(file.read(length))
            if pieces[0] != pieces[1]:
                return False
        return True

    def __enter__(self) -> Twins:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self.files:
            file.close()
