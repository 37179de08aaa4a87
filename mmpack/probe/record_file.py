"""Records as files: `.probe`, a zip of one header.json and two arrays for each entry, none of them compressed.

Written whole or not at all. Fields of the header that this version doesn't know are kept. Every array is checked by
its CRC, its dtype and its shape.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, kind_of
from mmpack.files import replaced
from mmpack.probe.places import TEXT, Places
from mmpack.probe.record import IN, OUT, Entry, Record
from mmpack.schema.saved import parse_json

SUFFIX = ".probe"
FORMAT, VERSION = "mmpack.probe", 1
HEADER = "header.json"
_MOST = 1 << 28  # bytes of a header
_SPACE = re.compile(rf"{TEXT}|[1-9]\d{{0,5}}(/[1-9]\d{{0,5}})?", re.ASCII)
_OF_RECORD = ("name", "directions", "seed", "about", "aliases")
_KNOWN = {*_OF_RECORD, "format", "version", "unplaced", "places", "entries"}
_OF_ENTRY = ("module", "side", "space", "source", "width", "local")


def write_record(path: str | os.PathLike[str], record: Record) -> None:
    """Write a record to `path`, which ends in `.probe`. Raises: ArgumentError."""
    path = _path("Record.save", path)
    if path.suffix != SUFFIX:
        raise ArgumentError(
            f"Record.save: {path.name!r:.60} doesn't end in {SUFFIX}. Fix: give it that suffix"
        )
    header = record.extra | {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(record, name) for name in _OF_RECORD},
        "unplaced": sorted(record.unplaced),
        "places": record.places.to_dict(),
        "entries": [
            e.extra | {name: getattr(e, name) for name in _OF_ENTRY}
            for e in record.entries.values()
        ],
    }
    try:
        text = json.dumps(header)
    except (TypeError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise ArgumentError(
            f"Record.save: {record.name!r:.60} can't be written ({why}). Fix: keep JSON values in its about and extra"
        ) from None
    with (
        replaced(path, "Record.save", ArgumentError) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out,
    ):
        out.writestr(_named(HEADER), text)
        for k, entry in enumerate(record.entries.values()):
            out.writestr(_named(f"{k}.values"), _bytes(entry.values))
            out.writestr(_named(f"{k}.noise"), _bytes(entry.noise))


def read_record(path: str | os.PathLike[str]) -> Record:
    """The record in a `.probe` file. Raises: TraceError for what is none, is missing or is damaged; ArgumentError."""
    path = _path("read_record", path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait, a device never ends
            raise TraceError(
                f"read_record: {path} is a folder, a pipe or a device. Fix: name a file"
            )
        with zipfile.ZipFile(path) as file:
            return _read(file, path)
    except OSError as error:
        raise TraceError(
            f"read_record: {path} can't be read ({error.strerror or error}). "
            "Fix: pass a file that mmpack probe --save or Record.save made"
        ) from None
    except TraceError:
        raise
    except Exception as error:  # zipfile's, json's, numpy's and ours, each of its kind of damage
        why = " ".join(str(error).split())[:160]
        raise TraceError(
            f"read_record: {path} is not a record of the probe, or is damaged ({type(error).__name__}: {why}). "
            "Fix: record it again, with mmpack probe --save or Record.save"
        ) from None


def _read(file: zipfile.ZipFile, path: Path) -> Record:
    info = file.getinfo(HEADER)
    small = info.file_size <= _MOST and info.compress_type == zipfile.ZIP_STORED
    _need(small, "its header is too large")
    header = parse_json(file.read(HEADER), finite=False)
    known = isinstance(header, dict) and header.get("format") == FORMAT
    _need(known, "its header is another format's")
    if type(header.get("version")) is not int or header["version"] != VERSION:
        raise TraceError(
            f"read_record: {path} is of version {header.get('version')!r:.20}, this mmpack reads {VERSION}. "
            "Fix: record it again, or use the mmpack that wrote it"
        )
    for name in ("lengths", "tokens", "token_kind", "media", "grids", "placeholders"):
        _need(_whole_numbers(header["places"][name]), f"its {name} are not whole numbers")
    for name in ("sample_ids", "token_kinds", "modalities"):
        _need(_names(header["places"][name]), f"its {name} are not texts")
    places = Places.from_dict(header["places"])
    _check_places(places)
    directions, seed = (_whole(header, name) for name in ("directions", "seed"))
    _need(directions > 0, f"it has {directions} directions")
    entries: dict[str, Entry] = {}
    for k, given in enumerate(header["entries"]):
        module, side, space = (str(given[name]) for name in ("module", "side", "space"))
        _need(side in (IN, OUT), f"entry {k} is of side {side!r:.20}")
        _need(_SPACE.fullmatch(space), f"entry {k} is of space {space!r:.20}")
        source, local = given.get("source"), float(given["local"])
        fits = isinstance(source, str | None) and 0 <= local < math.inf
        _need(fits, f"entry {k} has source {source!r:.40}, local {local}")
        values = _array(file, f"{k}.values", (places.count(space), directions + 2))
        noise = _array(file, f"{k}.noise", (places.count(space), 2))
        extra = {name: value for name, value in given.items() if name not in _OF_ENTRY}
        width = _whole(given, "width")
        entry = Entry(module, side, space, values, noise, source, width, local, extra)
        _need(entry.name not in entries, f"it has {entry.name:.60} twice")
        entries[entry.name] = entry
    about, aliases, unplaced = header["about"], header["aliases"], header.get("unplaced", [])
    _need(isinstance(about, dict), "its field about is not an object")
    there = isinstance(aliases, dict) and set(map(str, aliases.values())) <= set(entries)
    _need(there, "its field aliases names entries that are not there")
    _need(_names(unplaced), "its field unplaced is no list of names")
    extra = {name: value for name, value in header.items() if name not in _KNOWN}
    name = str(header["name"])
    return Record(name, places, entries, directions, seed, about, aliases, set(unplaced), extra)


def _need(holds: object, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _check_places(p: Places) -> None:
    samples, kinds = len(p.sample_ids), len(p.token_kinds)
    alike = len(p.lengths) == samples and len(p.token_kind) == len(p.tokens)
    _need(alike, "its places have unlike lengths")
    alike = len(p.placeholders) == len(p.grids) == len(p.modalities) == len(p.media)
    _need(alike, "its media have unlike lengths")
    lengths = np.array(p.lengths, dtype=np.int64)
    for owner, kind, most, token in (
        (p.tokens[:, 0], p.token_kind, kinds, p.tokens[:, 1]),
        (p.media[:, 0], p.media[:, 2], _MOST, p.media[:, 3]),
    ):
        for values, end in ((owner, samples), (kind, most)):
            _need(((values >= 0) & (values < end)).all(), "a place names what is not there")
        _need((np.diff(owner) >= 0).all(), "its places are not in the order of the samples")
        inside = (token >= 0) & (token < lengths[owner])
        _need(inside.all(), "a token is not in its sample")
    for own, (sample, *_), grid in zip(p.placeholders, p.media.tolist(), p.grids, strict=True):
        inside = all(0 <= token < p.lengths[sample] for token in own)
        _need(inside, "a token is not in its sample")
        _need(((grid > 0) & (grid < _MOST)).all(), f"a medium has the grid {grid.tolist()}")


def _path(what: str, path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise ArgumentError(f"{what}: path is {kind_of(path)}. Fix: pass a file's path") from None


def _whole(header: dict[str, Any], name: str) -> int:
    value = header[name]
    _need(type(value) is int, f"its field {name} is {value!r:.40}")
    return int(value)


def _whole_numbers(values: Any) -> bool:
    """Whether these are whole numbers, or lists of them."""
    if isinstance(values, list):
        return all(map(_whole_numbers, values))
    return type(values) is int


def _names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _named(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name)  # of one date, so that equal records make equal files


def _bytes(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(values, dtype="<f4"), allow_pickle=False)
    return out.getvalue()


def _array(file: zipfile.ZipFile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    size, info = int(np.prod(shape)) * 4, file.getinfo(name)
    fits = info.compress_type == zipfile.ZIP_STORED and info.file_size <= size + 4096
    _need(fits, f"{name} has {info.file_size} bytes, expected about {size}")
    data = io.BytesIO(file.read(name))
    known = np.lib.format.read_magic(data) == (1, 0)
    _need(known, f"{name} is of another version of numpy's format")
    found, fortran, dtype = np.lib.format.read_array_header_1_0(data)
    same = found == shape and dtype == np.dtype("<f4") and not fortran
    _need(same, f"{name} is {dtype} {list(found)}, expected float32 {list(shape)}")
    # what the header says is allocated only now
    values = np.frombuffer(data.getvalue(), dtype=dtype, offset=data.tell())
    return values.astype(np.float32).reshape(shape)
