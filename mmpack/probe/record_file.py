"""Records as files: `.probe`, a zip of one header.json and two arrays for each entry, none of them compressed.

Written whole or not at all. Fields of the header that this version doesn't know are kept. Every array is checked by
its CRC, its dtype and its shape.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, kind_of
from mmpack.files import replaced
from mmpack.probe.places import Places
from mmpack.probe.record import IN, OUT, Entry, Record

SUFFIX = ".probe"
FORMAT, VERSION = "mmpack.probe", 1
HEADER = "header.json"
_MOST = 1 << 28  # bytes of a header
_KNOWN = {"format", "version", "name", "directions", "seed", "about", "places", "entries"}
_KNOWN_ENTRY = {"module", "side", "space", "source", "local"}


def write_record(path: str | os.PathLike[str], record: Record) -> None:
    """Write a record to `path`, which ends in `.probe`. Raises: ArgumentError."""
    if not isinstance(record, Record):
        raise ArgumentError(
            f"write_record: it is handed {kind_of(record)}. Fix: what probe.record returns"
        )
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ArgumentError(
            f"write_record: {path.name!r:.60} doesn't end in {SUFFIX}. Fix: give it that suffix"
        )
    header = record.extra | {
        "format": FORMAT,
        "version": VERSION,
        "name": record.name,
        "directions": record.directions,
        "seed": record.seed,
        "about": record.about,
        "places": record.places.to_dict(),
        "entries": [
            e.extra
            | {
                "module": e.module,
                "side": e.side,
                "space": e.space,
                "source": e.source,
                "local": e.local,
            }
            for e in record.entries.values()
        ],
    }
    with (
        replaced(path, "write_record", ArgumentError) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out,
    ):
        out.writestr(_named(HEADER), json.dumps(header))
        for k, entry in enumerate(record.entries.values()):
            out.writestr(_named(f"{k}.values"), _bytes(entry.values))
            out.writestr(_named(f"{k}.noise"), _bytes(entry.noise))


def read_record(path: str | os.PathLike[str]) -> Record:
    """The record in a `.probe` file. Raises: TraceError for what is none, is missing or is damaged."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            return _read(file, path)
    except OSError as error:
        raise TraceError(
            f"read_record: {path} can't be read ({error.strerror or error}). "
            "Fix: a file that mmpack probe --save or write_record made"
        ) from None
    except TraceError:
        raise
    except (
        Exception
    ) as error:  # zipfile's, json's, numpy's and ours of fields, each for its kind of damage
        why = " ".join(str(error).split())[:160]
        raise TraceError(
            f"read_record: {path} is no record of the probe, or is damaged ({type(error).__name__}: {why}). "
            "Fix: record it again, with mmpack probe --save or write_record"
        ) from None


def _read(file: zipfile.ZipFile, path: Path) -> Record:
    info = file.getinfo(HEADER)
    if info.file_size > _MOST or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its header is too large")
    header = json.loads(file.read(HEADER))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("its header is another format's")
    if header.get("version") != VERSION:
        raise TraceError(
            f"read_record: {path} is of version {header.get('version')!r:.20}, this mmpack reads {VERSION}. "
            "Fix: record it again, or use the mmpack that wrote it"
        )
    places = Places.from_dict(header["places"])
    _check_places(places)
    directions, seed = int(header["directions"]), int(header["seed"])
    entries: dict[str, Entry] = {}
    for k, given in enumerate(header["entries"]):
        if given["side"] not in (IN, OUT):
            raise ValueError(f"entry {k} is of side {given['side']!r:.20}")
        count = places.count(given["space"])
        entry = Entry(
            str(given["module"]),
            given["side"],
            str(given["space"]),
            _array(file, f"{k}.values", (count, directions + 2)),
            _array(file, f"{k}.noise", (count, 2)),
            given.get("source"),
            float(given["local"]),
            {name: value for name, value in given.items() if name not in _KNOWN_ENTRY},
        )
        entries[entry.name] = entry
    extra = {name: value for name, value in header.items() if name not in _KNOWN}
    about = header["about"]
    if not isinstance(about, dict):
        raise ValueError("its field about is no object")
    return Record(str(header["name"]), places, entries, directions, seed, about, extra)


def _check_places(p: Places) -> None:
    samples, kinds = len(p.sample_ids), len(p.token_kinds)
    if len(p.lengths) != samples or len(p.token_kind) != len(p.tokens):
        raise ValueError("its places have unlike lengths")
    if len(p.media_tokens) != len(p.media) or len(p.modalities) != len(p.media):
        raise ValueError("its media have unlike lengths")
    for values, most in (
        (p.tokens[:, 0], samples),
        (p.media[:, 0], samples),
        (p.token_kind, kinds),
    ):
        if len(values) and not (values.min() >= 0 and values.max() < most):
            raise ValueError("a place names what is not there")


def _named(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name)  # of one date, so that equal records make equal files


def _bytes(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(values, dtype="<f4"), allow_pickle=False)
    return out.getvalue()


def _array(file: zipfile.ZipFile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * 4
    info = file.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size + 4096:
        raise ValueError(f"{name} has {info.file_size} bytes, expected about {size}")
    found: Any = np.load(io.BytesIO(file.read(name)), allow_pickle=False)
    if found.shape != shape or found.dtype != np.dtype("<f4"):
        raise ValueError(
            f"{name} is {found.dtype} {list(found.shape)}, expected float32 {list(shape)}"
        )
    return np.asarray(found, dtype=np.float32)
