"""Record files: they come back as they were, and damaged or foreign ones are refused in one line."""

import json
import os
import tracemalloc
import zipfile

import numpy as np
import pytest
from support.probe_sides import layers, samples

import mmpack as mp


@pytest.fixture
def record():
    return mp.probe.record(layers(), samples())


def test_round_trip(record, tmp_path):
    path = tmp_path / "a.probe"
    record.extra["later"] = {"x": 1}
    next(iter(record.entries.values())).extra["kind"] = "new"
    record.save(path)
    found = mp.probe.read_record(path)
    assert list(found.entries) == list(record.entries)
    for name, entry in record.entries.items():
        other = found.entries[name]
        np.testing.assert_array_equal(entry.values, other.values)
        np.testing.assert_array_equal(entry.noise, other.noise)
        assert (entry.source, entry.local, entry.extra) == (other.source, other.local, other.extra)
    assert found.about == record.about and found.extra == {"later": {"x": 1}}
    assert mp.probe.run(record, found).ok
    again = tmp_path / "b.probe"
    found.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_every_damaged_byte_is_refused_or_harmless(record, tmp_path):
    """No byte that is turned over makes another record, or another error than ours."""
    path = tmp_path / "a.probe"
    record.save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            found = mp.probe.read_record(path)
        except mp.errors.TraceError as error:
            refused += 1
            assert "\n" not in str(error) and "Fix: " in str(error)
            continue
        for name, entry in record.entries.items():
            np.testing.assert_array_equal(entry.values, found.entries[name].values)
    assert refused > 100
    for share in (0.0, 0.3, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(mp.errors.TraceError, match="Fix: "):
            mp.probe.read_record(path)


def edited(path, edit):
    def header(parts):
        found = json.loads(parts["header.json"])
        edit(found)
        parts["header.json"] = json.dumps(found).encode()

    parted(path, header)


def parted(path, edit):
    """Change the files in a record."""
    with zipfile.ZipFile(path) as file:
        parts = {n: file.read(n) for n in file.namelist()}
    edit(parts)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h: h.update(version=2), "version 2"),
        (lambda h: h.pop("places"), "places"),
        (lambda h: h["places"].update(placeholders=[[1], [2], [3]]), "media"),
        (lambda h: h.update(aliases={"x<out": "none<out"}), "aliases"),
        (lambda h: h["places"]["tokens"].pop(), "unlike"),
        (lambda h: h["places"]["tokens"].__setitem__(0, [9, 0]), "not there"),
        (lambda h: h["entries"][0].update(side="up"), "side"),
        (lambda h: h.update(directions=3), "bytes|float32"),
        (lambda h: h.update(about=[]), "about"),
        (lambda h: h["entries"][0].update(space="1e99999999"), "space"),  # a number of gigabytes
        (lambda h: h["entries"][0].update(source=["embed"]), "source"),
        (lambda h: h["entries"][0].update(local=float("nan")), "local"),
        (lambda h: h["entries"][1].update(module="embed"), "twice"),
        (lambda h: h.update(directions=8.5), "directions"),
        (lambda h: h.update(seed=0.5), "seed"),
        (lambda h: h["places"]["tokens"].reverse(), "order"),
        (lambda h: h["places"]["tokens"].__setitem__(0, [0, 1000]), "not in its sample"),
        (lambda h: h["places"]["tokens"].__setitem__(0, [0, 0.7]), "whole"),
        (lambda h: h["places"]["media"][0].__setitem__(2, 2**62), "not there"),
        (lambda h: h["places"]["placeholders"][0].append(-1), "not in its sample"),
        (lambda h: h["places"].update(grids=[[0, 4, 6]]), "grid"),
    ],
)
def test_wrong_headers_are_refused(record, tmp_path, edit, words):
    path = tmp_path / "a.probe"
    record.save(path)
    edited(path, edit)
    with pytest.raises(mp.errors.TraceError, match=words):
        mp.probe.read_record(path)


def test_what_is_no_record(record, tmp_path):
    for name in ("a.txt", "a", None):
        with pytest.raises(mp.ArgumentError, match="Fix: "):
            record.save(name and tmp_path / name)
    path = tmp_path / "a.probe"
    for value in (object(), np.int64(3)):  # which no file can hold
        record.about["x"] = value
        with pytest.raises(mp.ArgumentError, match="Fix: keep JSON values"):
            record.save(path)
        assert not path.exists()
    path.write_text("{}")
    with pytest.raises(mp.errors.TraceError, match="not a record"):
        mp.probe.read_record(path)
    with pytest.raises(mp.errors.TraceError, match="can't be read"):
        mp.probe.read_record(tmp_path / "none.probe")


@pytest.mark.parametrize("shape", ["(1000000000,)", "(32, 10)", "(-1,)"])
def test_an_array_that_lies_of_its_size_allocates_nothing(record, tmp_path, shape):
    """Its own header says more than the file has."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    lie = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    path = tmp_path / "a.probe"
    record.save(path)
    parted(path, lambda parts: parts.update({"0.values": lie}))
    tracemalloc.start()
    with pytest.raises(mp.errors.TraceError, match="Fix: "):
        mp.probe.read_record(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.skipif(os.name != "posix", reason="no pipes and devices as files")
def test_what_is_no_file(tmp_path):
    """A pipe is not waited for, and a device that never ends is not read."""
    pipe, folder = tmp_path / "pipe.probe", tmp_path / "folder.probe"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder, "/dev/zero"):
        with pytest.raises(mp.errors.TraceError, match="Fix: name a file"):
            mp.probe.read_record(path)
    for path in (None, 3):
        with pytest.raises(mp.ArgumentError, match="Fix: "):
            mp.probe.read_record(path)
