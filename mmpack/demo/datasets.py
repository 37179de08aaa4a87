"""Problems with pictures: Geometry3K's own layout, parquet (`images`, `problem`, `answer`), the hub, or the drawn set.

They come in order of ids or rows; every picture is decoded here, and a bad one is an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpack.errors import ArgumentError, TraceError, check_whole, kind_of, require
from mmpack.files import read_bounded
from mmpack.processors.images import MAX_FILE_BYTES, decode

if TYPE_CHECKING:
    from PIL import Image

LETTERS = "ABCDEFGHIJ"
PROBLEMS = Path(__file__).parent / "problems"  # as fixtures/geometry.py of a checkout draws them
COLUMNS = ("images", "problem", "answer")


@dataclass(frozen=True, eq=False)
class Exercise:
    """A prompt goes to the model as all `images` in order, the video, then `prompt`, which holds no media tokens."""

    exercise_id: str  # unique in its data set
    prompt: str
    images: tuple[Image.Image, ...]  # decoded, in the mode of the file (Geometry3K's are RGBA)
    answer: str  # the value to be matched; of multiple choice, the right choice's text
    choices: tuple[str, ...] = ()
    answer_letter: str | None = None  # "A" is choices[0]
    source: str = ""
    video: bytes | None = field(default=None, repr=False)  # an encoded file


def load_exercises(
    data: str | Path | None = None, *, split: str = "train", limit: int | None = None
) -> list[Exercise]:
    """The first `limit` problems (None: all) of a data set.

    Args:
        data: None (16 problems that mmpack ships), a folder in Geometry3K's layout (`<split>/<id>/data.json` with
            `img_diagram.png`, or one split of it), a parquet file or a folder of them, or a hub name `owner/name`.
        split: its part; a single parquet file and the drawn set have only one.

    Raises: ArgumentError for arguments that name nothing; TraceError, with file and field, for a broken or empty set;
    MissingExtraError without Pillow, or without pyarrow or datasets where they are needed.
    """
    if limit is not None:
        check_whole("load_exercises", "limit", limit, fix="a positive number, or None for all")
    if not isinstance(data, str | os.PathLike | None):
        raise ArgumentError(
            f"load_exercises: data is {kind_of(data)}. Fix: pass a path or a hub name, or None for the drawn set"
        )
    if split in ("", "..") or Path(split).name != split:
        raise ArgumentError(
            f"load_exercises: split={split!r} is not a name. Fix: pass a name such as split='train'"
        )
    exercises = list(islice(_exercises(data, split), limit))
    if not exercises:
        raise _wrong(str(data), f"holds no problem in split {split!r}", "check folder and split")
    return exercises


def _exercises(data: str | Path | None, split: str) -> Iterator[Exercise]:
    if data is None:
        return _of_folder(PROBLEMS, "train")
    path = Path(data)
    if path.is_dir():
        return _of_folder(path, split)
    if path.is_file():
        if path.suffix != ".parquet":
            raise ArgumentError(
                f"load_exercises: {path} is not a .parquet file. Fix: pass one, a folder, or a hub name"
            )
        return _of_parquet([path])
    if isinstance(data, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data):
        return _of_hub(data, split)
    raise ArgumentError(
        f"load_exercises: there is no {str(data)!r}. Fix: pass a folder, a .parquet file, or a hub name such as "
        "hiyouga/geometry3k"
    )


# ---------------------------------------------------------------- Geometry3K's layout


def _of_folder(root: Path, split: str) -> Iterator[Exercise]:
    whole = (root / split).is_dir()
    folders = _exercise_folders(root / split if whole else root)
    if whole or any((folder / "data.json").exists() for folder in folders):
        return (_of_layout(folder, root) for folder in folders)
    return _of_parquet(_shards(root, split))


def _exercise_folders(split_folder: Path) -> list[Path]:
    """Numbers in order of number, then names; hidden folders are skipped."""
    folders = [f for f in split_folder.iterdir() if f.is_dir() and f.name[0] not in "._"]
    return sorted(
        folders, key=lambda f: (0, int(f.name), "") if f.name.isdecimal() else (1, 0, f.name)
    )


def _of_layout(folder: Path, root: Path) -> Exercise:
    where = str(folder / "data.json")
    record = _json_object(_file_below(root, folder, "data.json", where), where)
    names = _strings(record.get("images", ["img_diagram.png"]), "images", where)
    if not names:
        raise _broken(where, "images", "is empty, expected names of pictures")
    choices = _strings(record.get("choices", []), "choices", where)
    answer = _string(record, "answer", where)
    if choices:
        offered = LETTERS[: len(choices)]
        if len(answer) != 1 or answer not in offered:
            raise _broken(where, "answer", f"is {answer!r}, the choices are {', '.join(offered)}")
    return Exercise(
        exercise_id=folder.name,
        prompt=_string(record, "problem_text", where),
        images=tuple(
            _decoded(_file_below(root, folder, name, where), str(folder / name)) for name in names
        ),
        answer=choices[LETTERS.index(answer)] if choices else answer,
        choices=choices,
        answer_letter=answer if choices else None,
        source=folder.relative_to(root).as_posix(),
    )


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(where, f"is not JSON ({_line(error)})") from None
    if not isinstance(record, dict):
        raise _wrong(where, f"holds a {type(record).__name__}", "write a JSON object")
    return record


# ---------------------------------------------------------------- parquet and the hub


def _shards(folder: Path, split: str) -> list[Path]:
    """The split's parquet files: `<split>.parquet` and `<split>-….parquet`, there or in `data/`."""
    found = sorted([*folder.glob("*.parquet"), *(folder / "data").glob("*.parquet")])
    shards = [f for f in found if f.stem == split or f.name.startswith(f"{split}-")]
    if not shards:
        there = ", ".join(sorted(f.name for f in found or folder.iterdir())[:5]) or "nothing"
        wanted = f"neither {split}/<id>/data.json nor {split}-*.parquet"
        raise _wrong(str(folder), f"holds {wanted}, but {there}", "check folder and split")
    return shards


def _of_parquet(files: list[Path]) -> Iterator[Exercise]:
    pyarrow = require("pyarrow", "parquet", "load_exercises")
    parquet = require("pyarrow.parquet", "parquet", "load_exercises")
    count = 0
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(file.schema_arrow.names, str(path))
                for batch in file.iter_batches(batch_size=16, columns=list(COLUMNS)):
                    for row in batch.to_pylist():
                        yield _of_row(row, count, f"{path} row {count}", path.parent, path.name)
                        count += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise _wrong(str(path), f"can't be read as parquet ({_line(error)})") from None


def _of_hub(name: str, split: str) -> Iterator[Exercise]:
    datasets = require("datasets", "data", f"load_exercises({name!r})")
    try:
        rows = datasets.load_dataset(name, split=split)
        _check_columns(rows.column_names, name)
        rows = rows.cast_column("images", datasets.List(datasets.Image(decode=False)))
    except TraceError:
        raise
    except Exception as error:  # of many kinds: the network's, the hub's, the data set's own
        why = f"and the hub's data set can't be loaded ({type(error).__name__}: {_line(error)})"
        fix = "check path, name, split and network"
        raise _wrong(f"there is no folder {name},", why, fix) from None
    for i, row in enumerate(rows):
        yield _of_row(row, i, f"{name} row {i}", None, name)


def _check_columns(names: list[str], where: str) -> None:
    for name in COLUMNS:
        if name not in names:
            raise _broken(where, name, "is not a column of it")


def _of_row(
    row: dict[str, Any], index: int, where: str, root: Path | None, source: str
) -> Exercise:
    """A row's `problem` begins with one `<image>` token per picture, or has none."""
    items = row["images"]
    if not isinstance(items, list) or not items:
        raise _broken(where, "images", f"is {_kind(items)}, expected a list of pictures")
    prompt, tokens = _string(row, "problem", where).strip(), 0
    while prompt.startswith("<image>"):
        prompt, tokens = prompt.removeprefix("<image>").lstrip(), tokens + 1
    if tokens not in (0, len(items)) or "<image>" in prompt:
        tokens += prompt.count("<image>")
        found = f"{tokens} <image> tokens for {len(items)} pictures"
        raise _broken(where, "problem", f"has {found}, expected one each at its beginning")
    return Exercise(
        exercise_id=str(index),
        prompt=prompt,
        images=tuple(_of_cell(item, root, f"{where} images[{i}]") for i, item in enumerate(items)),
        answer=_string(row, "answer", where),
        source=source,
    )


def _of_cell(item: Any, root: Path | None, where: str) -> Image.Image:
    """A picture as parquet holds it: `bytes`, or else the `path` of a file below `root`."""
    data, path = (item.get("bytes"), item.get("path")) if isinstance(item, dict) else (None, None)
    if data is None and isinstance(path, str) and root is not None:
        data = _file_below(root, root, path, where)
    if not isinstance(data, bytes):
        raise _wrong(where, "has no bytes", "store pictures as {bytes, path}")
    return _decoded(data, where)


# ---------------------------------------------------------------- checks


def _file_below(root: Path, folder: Path, name: str, where: str) -> bytes:
    """The bytes of `folder / name`, which must be a file that really lies below `root`."""
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(root.resolve())
        data = read_bounded(path, MAX_FILE_BYTES) if inside and path.is_file() else None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _wrong(f"{where}: {name!r}", f"can't be read ({_line(error)})") from None
    if not inside:
        why = f"names {name!r}, which lies outside {root}"
        raise _wrong(where, why, "move the file below it")
    if data is None:
        raise _wrong(f"{where}:", f"there is no file {name!r}", "check the folder")
    return data


def _decoded(data: bytes, where: str) -> Image.Image:
    return decode(data, f"load_exercises: {where}", TraceError)


def _string(record: dict[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise _broken(where, name, "is missing")
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise _broken(where, name, f"is {_kind(value)}, expected a text")
    return value


def _strings(value: Any, name: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise _broken(where, name, f"is {_kind(value)}, expected a list of texts")
    return tuple(value)


def _broken(where: str, field: str, why: str) -> TraceError:
    return _wrong(f"{where}: field {field!r}", why, "write the field as the format requires")


def _wrong(where: str, why: str, fix: str = "check the file") -> TraceError:
    return TraceError(f"load_exercises: {where} {why}. Fix: {fix}")


def _kind(value: Any) -> str:
    return "empty" if value in ("", []) else f"a {type(value).__name__}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
