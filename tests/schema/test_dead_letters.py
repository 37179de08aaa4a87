"""Dead letters: written whole, once, by whoever comes first, and read by every command that reads traces."""

import errno
import json
import os
import random
import subprocess
import sys

import pytest
from support.blobs import ENVIRONMENT, process
from support.process import call_mmpack
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.errors import ArgumentError, BlobError, SchemaError, TraceError, UnwrittenWarning
from mmpack.schema.dead_letters import letter_of
from mmpack.schema.jsonl import dump_json


def letter(i: int, sample=None) -> mp.schema.DeadLetter:
    return mp.schema.DeadLetter("MM505", f"reason\nof {i}", f"t.jsonl: record {i}", sample)


def test_letters_come_back(tmp_path):
    kept, odd = full_sample("a"), make_sample([("text", [1, 2])], "odd")
    odd.input_ids = None  # no record can hold it
    letters = [
        letter(0, kept),
        letter(1),
        mp.schema.DeadLetter("MM001", "no JSON", "p", None, "{x"),
    ]
    book = mp.schema.DeadLetters(tmp_path / "dead.jsonl")
    book.add([*letters, letter(2, odd)])
    *read, last = book.read()
    assert read == letters and "dead_letter" not in kept.metadata
    assert last.sample is None and "Sample('odd'" in last.record
    assert (len(book), book.counts, book.unwritten) == (4, {"MM505": 3, "MM001": 1}, 0)


def test_letters_with_samples_are_a_trace(tmp_path):
    path = tmp_path / "dead.jsonl"
    good = make_sample([("text", [1, 2]), ("response", [3])], "good")
    broken = make_sample([("text", [1, 2]), ("response", [3])], "broken")
    broken.loss_spans = [mp.LossSpan(0, 2)]
    book = mp.schema.DeadLetters(path)
    book.add([letter(0, good), letter(1, broken)])
    [one, two] = mp.read_trace(path)
    about = {"code": "MM505", "reason": "reason\nof 0", "place": "t.jsonl: record 0"}
    assert one.metadata["dead_letter"] == about and two.sample_id == "broken"
    assert [x.sample for x in book.read()] == [good, broken]
    done = call_mmpack("validate", str(path), "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["codes"] == {"MM202": 1}


def test_each_name_is_written_once_by_one_and_by_others(tmp_path):
    path = tmp_path / "dead.jsonl"
    one, two = mp.schema.DeadLetters(path), mp.schema.DeadLetters(path)
    one.add([letter(0), letter(0), letter(1)])
    two.add([letter(1), letter(2)])
    one.add([letter(2), letter(3)])
    assert [x.place[-1] for x in one.read()] == ["0", "1", "2", "3"]
    assert (len(one), len(two)) == (4, 2)


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_a_killed_writer_left_goes(tmp_path, cut):
    path = tmp_path / "dead.jsonl"
    mp.schema.DeadLetters(path).add([letter(0), letter(1)])
    path.write_bytes(path.read_bytes()[:-cut])
    book = mp.schema.DeadLetters(path)
    book.add([letter(1), letter(2)])
    assert [x.place[-1] for x in book.read()] == ["0", "1", "2"]
    assert path.read_bytes().count(b"\n") == 3


ADDING = """
import mmpack as mp
book = mp.schema.DeadLetters({code!r})
print("ready", flush=True)
while True:
    for i in range(200):
        book.add(mp.schema.DeadLetter("MM505", "x" * 5000, str(i)))
    book = mp.schema.DeadLetters({code!r})
"""


def test_writers_that_are_killed(tmp_path):
    path = tmp_path / "dead.jsonl"
    with process(str(path), program=ADDING) as one, process(str(path), program=ADDING) as two:
        for writer in (one, two):
            assert writer.stdout.readline() == b"ready\n"
        while not (path.exists() and path.stat().st_size):
            pass
        two.kill()
        one.kill()
    book = mp.schema.DeadLetters(path)
    book.add(mp.schema.DeadLetter("MM505", "last", str(i)) for i in range(200))
    assert sorted(int(x.place) for x in book.read()) == list(range(200))
    assert path.read_bytes().count(b"\n") == 200


FULL = """
import resource, signal, sys, warnings
import mmpack as mp

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
book = mp.schema.DeadLetters(sys.argv[1])
book.add(mp.schema.DeadLetter("MM505", "first", "0"))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for i in range(1, 4):
        book.add(mp.schema.DeadLetter("MM505", "x" * 500, str(i)))
print(len(said), len(book), book.unwritten, [x.place for x in book.read()])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
book.flush()
print(book.unwritten, [x.place for x in book.read()])
"""


def test_a_full_disk_keeps_letters_waiting(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "dead.jsonl"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    expected = ["1 4 3 ['0']", "0 ['0', '1', '2', '3']"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", ["rotated", "replaced", "emptied", "grown"])
def test_a_file_may_be_rotated_or_emptied(tmp_path, change):
    path = tmp_path / "dead.jsonl"
    book = mp.schema.DeadLetters(path)
    book.add([letter(0), letter(1)])
    others = [letter(10 + i, full_sample(f"s{i}")) for i in range(3)]
    if change in ("rotated", "replaced"):
        path.rename(path.with_suffix(".1"))
    else:
        path.write_bytes(b"")
    expected = others if change in ("replaced", "grown") else []
    mp.schema.DeadLetters(path).add(expected)
    book.add([letter(2), letter(1), others[0]])
    book.add(letter(3))
    expected = expected + [letter(2), *([] if expected else others[:1]), letter(3)]
    assert list(mp.schema.DeadLetters(path).read()) == expected
    assert b"\0" not in path.read_bytes() and path.read_bytes().count(b"\n") == len(expected)


CONFIG = b'{"lr": 1e-6, "path": "out", "gpus": 8}'
TRACE = (dump_json(full_sample("a").to_dict(numpy=True)) + "\n").encode()


@pytest.mark.parametrize("content", [CONFIG + b"\n", TRACE, TRACE[:50], b"\0" * 40])
def test_a_file_of_anything_else_stays_as_it_is(tmp_path, content):
    path = tmp_path / "dead.jsonl"
    book = mp.schema.DeadLetters(path)
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"DeadLetters: .*dead.jsonl (holds|ends in).*Fix: "):
        mp.schema.DeadLetters(path)
    with pytest.warns(UnwrittenWarning, match=r"dead.jsonl can't be written \((holds|ends in)"):
        book.add(letter(0))
    assert path.read_bytes() == content and book.unwritten == 1
    if not content.endswith(b"\n"):  # nor is a tail cut off that no writer of letters left
        path.write_bytes(letter(1).line().encode() + b"\n" + content)
        book.flush()
        assert path.read_bytes().endswith(content) and book.unwritten == 1


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/full"):
        with pytest.raises(ArgumentError, match="is no regular file"):
            mp.schema.DeadLetters(path)


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), "MM505"),
        (FileNotFoundError(errno.ENOENT, "no such file"), "MM501"),
        (chained(ArgumentError("x can't be read"), PermissionError(errno.EACCES, "no")), "MM501"),
        (BlobError("x", "MM502"), "MM502"),
        (SchemaError([mp.schema.Problem("MM109", "a", "media[0]", "differs")]), "MM109"),
    ],
)
def test_codes_of_errors(error, code):
    made = letter_of(error, "here")
    assert made.code == code and made.reason.startswith(f"{type(error).__name__}: ")
    assert "\n" not in made.reason


# ---------------------------------------------------------------- traces with damaged records


def damaged(line: bytes, kind: str) -> bytes:
    record = json.loads(line)
    if kind == "cut":
        return line[: len(line) // 2] + b"\n"
    if kind == "bytes":
        return line[:30] + b"\xff\xfe" + line[32:]
    if kind == "type":
        record["input_ids"] = "many"
    elif kind == "missing":
        del record["loss_spans"]
    elif kind == "twice":
        record["sample_id"] = "s0"
    return json.dumps(record).encode() + b"\n"


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_reading_goes_on_past_damaged_records(tmp_path, name):
    zstandard = pytest.importorskip("zstandard")
    draw = random.Random(0)
    samples = [full_sample(f"s{i}") for i in range(30)]
    mp.write_trace(tmp_path / "t.jsonl", samples)
    lines = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    broken = {
        i: draw.choice(["cut", "bytes", "type", "missing", "twice"])
        for i in draw.sample(range(1, 30), 9)
    }
    expected = {}
    for i, kind in broken.items():
        lines[i] = damaged(lines[i], kind)
        alone = tmp_path / "alone.jsonl"
        alone.write_bytes(lines[0] + lines[i])
        with pytest.raises(TraceError) as caught:
            list(mp.read_trace(alone))
        expected[f"{tmp_path / name}: record {i + 1}"] = caught.value.code
    text = b"".join(lines)
    path = tmp_path / name
    path.write_bytes(text if name == "t.jsonl" else zstandard.ZstdCompressor().compress(text))
    book = mp.schema.DeadLetters(tmp_path / "dead.jsonl")
    read = list(mp.read_trace(path, dead_letters=book))
    assert read == [s for i, s in enumerate(samples) if i not in broken]
    assert {x.place: x.code for x in book.read()} == expected
    assert len(read) + len(book) == len(samples)
    with pytest.raises(TraceError):
        list(mp.read_trace(path))
    os.remove(path)
