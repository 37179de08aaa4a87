"""What commands print where there is no terminal; and no output overwrites an input."""

import re
import subprocess
import sys

import pytest
from PIL import Image
from support.process import call_mmpack
from support.samples import full_sample

import mmpack as mp
from mmpack.cli.main import build
from mmpack.cli.output import Result, emit, table


def test_a_wide_table_is_one_line_per_row(capsys, monkeypatch):
    names = [f"column_{k:02d}" for k in range(20)]
    wide = table(names, [range(20), range(20)])
    monkeypatch.delenv("COLUMNS", raising=False)
    emit(Result({}, [wide]), as_json=False, out=None)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines if "0" in line] == [20, 20, 20]

    monkeypatch.setenv("COLUMNS", "40")  # who sets it gets it
    emit(Result({}, [wide]), as_json=False, out=None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def trace_in(folder):
    mp.write_trace(folder / "a.jsonl", [full_sample("s0")])
    return folder / "a.jsonl"


@pytest.mark.parametrize("link", ["itself", "symlink", "hard link"])
@pytest.mark.parametrize(
    "args",
    [
        "inspect TRACE --out OUT",
        "parity OTHER TRACE --html OUT",
        "plan TRACE --max-tokens 99 --save OUT",
        "plan OTHER --max-tokens 99 --cost TRACE --out OUT",
        "convert TRACE OUT.jsonl",
        "view TRACE -o OUT",
        "view OTHER --png new.png --plan TRACE --bin 0 --out OUT",
        "frames TRACE --policy vllm --out OUT",
        "frames TRACE --policy vllm --sheet OUT.png",
        "probe tiny:qwen2_5_vl tiny:qwen2_5_vl --trace TRACE --out OUT",
        "probe file:TRACE tiny:qwen2_5_vl --out OUT",
    ],
)
def test_no_output_overwrites_an_input(tmp_path, monkeypatch, args, link):
    monkeypatch.chdir(tmp_path)
    trace = trace_in(tmp_path)
    was = trace.read_bytes()
    (tmp_path / "b.jsonl").write_bytes(was)
    out = trace
    if link != "itself":
        suffix = next((s for s in (".png", ".jsonl") if f"OUT{s}" in args), "")
        out = tmp_path / f"link{suffix}"
        getattr(out, "symlink_to" if link == "symlink" else "hardlink_to")(trace)
    words = {"TRACE": "a.jsonl", "OTHER": "b.jsonl", "OUT": out, "OUT.png": out, "OUT.jsonl": out}
    line = [str(words.get(word, word)).replace("TRACE", "a.jsonl") for word in args.split()]
    before = sorted(tmp_path.iterdir())
    result = call_mmpack(*line)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert result.stderr.count("\n") == 1 and "which this command reads. Fix: " in result.stderr
    assert trace.read_bytes() == was and sorted(tmp_path.iterdir()) == before


def test_what_a_command_reads_later_is_kept_too(tmp_path, monkeypatch):
    """Files that are not on the command line: media of a trace, traces of a folder, files of a checkpoint."""
    monkeypatch.chdir(tmp_path)
    sample = full_sample("s0")
    sample.media[0].source = "screen.png"
    mp.write_trace(tmp_path / "a.jsonl", [sample])
    Image.new("RGB", (8, 8)).save(tmp_path / "screen.png")
    mp.write_trace(tmp_path / "vllm.jsonl", [sample])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for args in (
        ("view", "a.jsonl", "--media-root", ".", "--out", "screen.png"),
        ("plan", "a.jsonl", "--max-tokens", 99, "--model", "model", "--out", "model/config.json"),
        ("init", "loop", ".", "--out", "train.py"),
    ):
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        result = call_mmpack(*args)
        assert (result.returncode, result.stdout) == (2, ""), result
        assert " this command " in result.stderr and "Fix: write to another" in result.stderr
        assert all(path.read_bytes() == was for path, was in before.items())


def test_a_report_may_be_written_again(tmp_path):
    trace = trace_in(tmp_path)
    for _ in range(2):
        assert call_mmpack("validate", trace, "--out", tmp_path / "report.json").returncode == 0
    page = tmp_path / "page.png"  # the second would take the first one's place without a word
    for args in (
        ("parity", trace, trace, "--out", page, "--html", page),
        ("view", trace, "-o", page, "--png", page),
        ("view", trace, "-o", page, "--json", "--out", page),
    ):
        done = call_mmpack(*args)
        assert (done.returncode, done.stdout, page.exists()) == (2, "", False)
        assert "'page.png' is named for two documents. Fix: " in done.stderr


def test_the_file_that_stdout_goes_to_is_added_to(tmp_path):
    trace, log = trace_in(tmp_path), tmp_path / "log"
    for args, code in (
        (("validate", trace, "--out"), 0),
        (("plan", trace, "--max-tokens", 99, "--save"), 2),
    ):
        log.write_text("before\n")
        command = [sys.executable, "-m", "mmpack", *map(str, args), "/dev/stdout"]
        with log.open("a") as file:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == code and log.read_text().startswith("before\n"), done
        assert ("Fix: " in done.stderr) if code else ('"ok": true' in log.read_text())


def test_every_file_that_a_command_writes_is_declared():
    for name, command in build().commands.items():
        for param in command.params:
            if re.match(
                "Write|Record A|The (page|trace) to write|A report to add", param.help or ""
            ):
                assert param.callback.__name__ == "writable", (name, param.name)
