"""Completion by the shells themselves, where they are here, and the answers that their scripts read."""

import os
import shutil
import subprocess
import sys

import pytest
from support.process import call_mmpack, run_mmpack

from mmpack.cli.main import COMMANDS


def answer(shell, line):
    """What the script of a shell gets for a line, whose last word is being written."""
    words = line.split(" ")
    asked = {"_MMPACK_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    asked |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in asked.items():
            patch.setenv(name, value)
        result = call_mmpack()
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_bash_completes_commands_and_their_options():
    assert answer("bash", "mmpack va").splitlines() == ["validate"]
    assert answer("bash", "mmpack ").splitlines() == list(COMMANDS)
    assert answer("bash", "mmpack pro").splitlines() == ["probe"]
    assert "--max-findings" in answer("bash", "mmpack parity --m").splitlines()
    assert answer("bash", "mmpack validate trace").strip() == ""  # the shell completes files


def test_zsh_and_fish_get_the_help_too():
    assert '"validate":"Check every sample of a trace' in answer("zsh", "mmpack val")
    (line,) = answer("fish", "mmpack val").splitlines()
    assert line.startswith("validate\tCheck every sample of a trace")


def test_another_shell_is_one_line():
    result = call_mmpack("--show-completion", "tcsh")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "tcsh" in result.stderr and "Fix: see `mmpack --help`" in result.stderr


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".bash_completions/mmpack.sh"),
        ("zsh", ".zfunc/_mmpack"),
        ("fish", ".config/fish/completions/mmpack.fish"),
    ],
)
def test_installing_writes_the_script_that_is_shown(tmp_path, monkeypatch, shell, file):
    monkeypatch.setenv("HOME", str(tmp_path))
    result = call_mmpack("--install-completion", shell)
    assert (result.returncode, result.stderr) == (0, "")
    shown = call_mmpack("--show-completion", shell).stdout
    assert (tmp_path / file).read_text().strip() == shown.strip()
    assert f"_MMPACK_COMPLETE=complete_{shell}" in shown


PRINT = '; printf "%s\\n" "${COMPREPLY[@]}"'
TAB = {
    "bash": "source script; COMP_WORDS=(mmpack insp); COMP_CWORD=1; _mmpack_completion mmpack"
    + PRINT,
    "fish": "source script; complete --do-complete 'mmpack insp'",
}


@pytest.mark.parametrize("shell", TAB)
def test_tab(tmp_path, shell):
    """The shell itself, with its script, and the command in its PATH."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    command = tmp_path / "mmpack"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmpack "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(run_mmpack("--show-completion", shell).stdout)
    done = subprocess.run(
        [shell, "-c", TAB[shell]],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[0] == "inspect", done
