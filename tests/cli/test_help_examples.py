"""Examples of `--help`: each one parses, those that are quick run; the manual page holds all that the help does."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support import manual
from support.process import call_mmpack
from support.samples import full_sample

import mmpack as mp
from mmpack.cli.main import COMMANDS, build

EXAMPLES = {name: manual.examples(build().commands[name]) for name in COMMANDS}
LINES = [(name, line) for name, lines in EXAMPLES.items() for line in lines]
QUICK = ("parity", "validate", "inspect", "init", "view", "plan", "doctor", "schema")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the files that examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "screens").mkdir()
    samples = [full_sample(f"s{i}", seed=i) for i in range(2)]
    for name in ("rollout", "train"):
        mp.write_trace(f"{name}.jsonl", samples)
    mp.plan(samples, max_tokens=99).save("plan.json")
    Path("report.json").write_text(mp.compare(samples, samples).to_json(), encoding="utf-8")
    Path("sample.schema.json").write_text(call_mmpack("schema").stdout, encoding="utf-8")
    Path("clip.mp4").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(("name", "line"), LINES)
def test_an_example_parses_and_if_it_is_quick_runs(here, name, line):
    command = build().commands[name]
    with command.make_context(name, shlex.split(line)[1 + len(name.split()) :]) as context:
        assert context.params
    if name in QUICK and "--model" not in line:
        result = call_mmpack(*shlex.split(line)[1:])
        assert (result.returncode, result.stderr) == (0, ""), result


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_examples_and_the_page_shows_the_help(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = call_mmpack(*name.split(), "--help")
    assert result.returncode == 0
    said = " ".join(result.stdout.split())
    assert '" "' not in said  # a string in two parts inside a docstring
    page = manual.PAGE.read_text(encoding="utf-8")
    for line in EXAMPLES[name]:
        assert line in said and manual.roff(line) in page.splitlines()
    for parameter in (p for p in build().commands[name].params if not getattr(p, "hidden", False)):
        for option in [o for o in parameter.opts if o.startswith("-")]:
            assert option in said and manual.roff(option) in page


def test_the_page_is_what_its_generator_makes():
    assert manual.PAGE.read_text(encoding="utf-8") == manual.page()


def test_groff_has_nothing_to_say_about_the_page():
    if shutil.which("groff") is None:
        pytest.skip("no groff here")
    command = ["groff", "-man", "-wmac", "-wchar", "-wescape", "-Tutf8", str(manual.PAGE)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == "" and "github" in result.stdout
    assert manual.roff(".x\\-'") == "\\&.x\\e\\-'"
