"""What goes wrong ends in one line on stderr and an exit code, never in a traceback."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.marked_clips import clip
from support.process import call_mmpack, fails, refused, run_python
from support.samples import full_sample

import mmpack as mp

MAIN = "import sys; from mmpack.cli.main import main; sys.exit(main())"


@pytest.fixture
def lines(tmp_path):
    mp.write_trace(tmp_path / "good.jsonl", [full_sample("s0"), full_sample("s1")])
    return (tmp_path / "good.jsonl").read_text().splitlines()


def damaged(lines, how):
    record = json.loads(lines[1])
    match how:
        case "not a trace":
            return "hello\n", "MM001", "record 1"
        case "truncated":
            return lines[0] + "\n" + lines[1][:-40], "MM002", "record 2"
        case "wrong type":
            record["input_ids"] = "abc"
            return lines[0] + "\n" + json.dumps(record), "MM003", "record 2.input_ids"
        case "NaN":
            record["rollout_logprobs"][3] = float("nan")
            return lines[0] + "\n" + json.dumps(record), "MM009", "record 2.rollout_logprobs[3]"
        case "huge number":
            text = lines[1].replace('"start":', '"start":1' + "0" * 5000, 1)
            return lines[0] + "\n" + text, "MM003", "record 2.modality_spans[0].start"
        case "duplicate id":
            return lines[0] + "\n" + lines[0], "MM007", "record 2.sample_id"


@pytest.mark.parametrize(
    "how", ["not a trace", "truncated", "wrong type", "NaN", "huge number", "duplicate id"]
)
def test_damaged_traces(tmp_path, lines, how):
    text, *parts = damaged(lines, how)
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    for command in (["validate"], ["inspect"], ["parity", path], ["plan", "--max-tokens", 99]):
        fails(call_mmpack(*command, path), "bad.jsonl", *parts)
        if how != "truncated":
            break


def test_missing_files(tmp_path):
    gone = tmp_path / "no\nne.jsonl"
    for args in (["validate"], ["inspect"], ["parity", gone], ["plan", "--max-tokens", 9]):
        fails(call_mmpack(*args, gone), "MM001", "does not exist")
    fails(call_mmpack("schema", "--check", gone), "--check")


TINY = "tiny:qwen2_5_vl"
PLAN, FRAMES = "plan good.jsonl", "frames video.mp4 --policy"
WRONG = [
    ("", "Missing command"),
    ("nonsense", "'nonsense'"),
    (PLAN, "--max-tokens"),
    (f"{PLAN} --max-tokens 0", "--max-tokens"),
    (f"{PLAN} --max-tokens 5", "MM405"),
    (f"{PLAN} --memory 40GB", "--model"),
    (f"{PLAN} --model gone.json --memory 40GB", "gone.json"),
    (f"{PLAN} --model good.jsonl --memory 40GB", "not JSON"),
    (f"{PLAN} --model . --memory lots", "'lots'"),
    (f"{PLAN} --max-tokens 99 --auto-share --share-prefix", "pass one"),
    ("parity good.jsonl good.jsonl --require colour", "'colour'"),
    ("parity good.jsonl good.jsonl --html .", "--html"),
    ("parity good.jsonl good.jsonl --json --format sarif", "pass one"),
    ("parity good.jsonl good.jsonl --format xml", "'xml'"),
    ("inspect good.jsonl --sample s9", "'s9'"),
    ("inspect good.jsonl --sample \udcff", "no sample"),
    ("validate good.jsonl --out nowhere/out.json", "--out"),
    ("convert good.jsonl new.txt", "new.txt"),
    ("convert good.jsonl no/new.jsonl", "the folder of"),
    ("smoke --temperature nan", "--temperature"),
    ("schema --action --rules", "two different pages"),
    ("frames video.mp4", "--policy"),
    ("frames good.jsonl --policy vllm", "good.jsonl"),
    ("frames gone.mp4 --policy vllm", "gone.mp4"),
    (f"{FRAMES} uniform", "'uniform'"),
    (f"{FRAMES} vllm:frames=3", "'frames'"),
    (f"{FRAMES} vllm:fps", "'fps' is not a setting"),
    (f"{FRAMES} vllm --set colour=red", "'colour'"),
    (f"{FRAMES} vllm --set fps=often", "fps"),
    (f"{FRAMES} qwen_vl_utils:nframes=500", "500 frames wanted"),
    (f"{FRAMES} vllm:info_or_source=x", "no setting 'info_or_source'"),
    (f"{FRAMES} vllm:fps=2,fps=3", "'fps' is set twice"),
    (f"{FRAMES} vllm:fps=" + "[" * 50_000, "fps"),
    (f"probe {TINY}", "--save"),
    (f"probe {TINY} {TINY} --save x.probe", "--save"),
    (f"probe tiny:nothing {TINY}", "'nothing'"),
    (f"probe {TINY}?layout=wide {TINY}", "'wide'"),
    (f"probe {TINY}?attached=maybe {TINY}", "'maybe'"),
    (f"probe {TINY}?temperature=x {TINY}", "'x'"),
    (f"probe {TINY}?attention=none {TINY}", "'none'"),
    (f"probe {TINY}?colour=red {TINY}", "'colour'"),
    (f"probe {TINY}?layout=alone&layout=packed {TINY}", "twice"),
    (f"probe {TINY}?device=cuda:99 {TINY}", "'cuda:99'"),
    (f"probe python:no.such:function {TINY}", "'no.such:function'"),
    (f"probe python:json:loads {TINY}", "'json:loads'"),
    (f"probe hf:/no/such/folder {TINY}", "/no/such/folder"),
    (f"probe none.probe {TINY}", "none.probe"),
    (f"probe {TINY} {TINY} --tokens some", "'some'"),
    (f"probe {TINY} {TINY} --factor -1", "factor"),
    (f"probe {TINY} {TINY} --trace none.jsonl", "none.jsonl"),
    ("probe hf:x hf:y", "--trace"),
    ("probe a.probe b.probe --tokens 99999", "--tokens"),
    ("probe a.probe b.probe --limit 1", "--limit"),
    ("probe a.probe b.probe --draw-pixels", "--draw-pixels"),
    ("plan good.jsonl --max-tokens 99 --max-media-bytes 2XB", "--max-media-bytes '2XB'"),
    ("plan good.jsonl --max-tokens 99 --max-media-bytes 9999999999GB", "--max-media-bytes"),
    ("plan good.jsonl --memory 2XB --model x", "--memory '2XB'"),
]


@pytest.mark.parametrize(("line", "part"), WRONG, ids=[line[:60] for line, _ in WRONG])
def test_bad_usage(tmp_path, monkeypatch, lines, line, part):
    monkeypatch.chdir(tmp_path)
    if line.startswith("frames"):
        Path("video.mp4").write_bytes(clip(138))
    refused(*line.split(), parts=[part])


@pytest.mark.parametrize(
    ("package", "line", "extra"),
    [("typer", "--help", "cli"), ("rich", "--help", "cli"), ("torch", "smoke", "smoke")],
)
def test_without_an_extra(package, line, extra):
    code = f"import sys; sys.modules[{package!r}] = None; {MAIN}"
    fails(run_python(code, line), package, f"mmpack[{extra}]")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    refused(
        "schema", "--check", str(tmp_path / "pipe.json"), parts=["pipe.json", "a pipe or a device"]
    )


def test_interrupted(tmp_path, lines):
    code = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
import mmpack.schema.trace
mmpack.schema.trace.read_trace = lambda path: os.kill(os.getpid(), signal.{signal.SIGINT.name})
{MAIN}
"""
    result = run_python(code, "validate", str(tmp_path / "good.jsonl"))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_closed_pipe_is_quiet():
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()


def test_full_disk(tmp_path, lines):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", MAIN, "schema"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "No space left" in result.stderr
    trace = tmp_path / "good.jsonl"
    fails(call_mmpack("validate", trace, "--out", "/dev/full"), "/dev/full can't be written")


def test_paths_that_cannot_be(tmp_path, monkeypatch, lines):
    """Links in a circle, names that are too long, pipes without an end, folders that can't be made."""
    monkeypatch.chdir(tmp_path)
    for name in ("loop.jsonl", "loop.json"):
        Path(name).symlink_to(name)
    os.mkfifo("pipe.json")
    long = "x" * 300
    for args in (
        ("validate", "good.jsonl", "--out", "loop.json"),
        ("convert", "good.jsonl", "loop.jsonl"),
        ("view", "good.jsonl", "-o", long),
        ("validate", f"{long}.jsonl"),
        ("init", "loop", "loop.json"),
        ("init", "loop", "/proc/folder"),
        ("view", "pipe.json"),
        ("schema", "--check", "pipe.json"),
        ("plan", "good.jsonl", "--max-tokens", 99, "--cost", "pipe.json"),
        ("plan", "good.jsonl", "--max-tokens", 99, "--model", "pipe.json"),
        ("plan", "good.jsonl", "--max-tokens", 99, "--model", "/dev/zero"),
    ):
        assert len(fails(call_mmpack(*args)).stderr) < 600


def test_a_full_memory_is_one_line(monkeypatch, tmp_path):
    def full(path):
        raise MemoryError

    monkeypatch.setattr("mmpack.schema.trace.read_trace", full)
    fails(call_mmpack("validate", tmp_path), "out of memory")
