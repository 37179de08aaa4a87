"""What `mmpack` takes before a subcommand, and completion by the shell: typer's scripts, asked for by the shell's name.

The script of a shell runs `mmpack` with `_MMPACK_COMPLETE` set each time that Tab is pressed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer import completion

from mmpack._version import __version__

COMPLETE = "_MMPACK_COMPLETE"


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completes() -> bool:
    """Whether a shell's script runs this process."""
    return bool(os.environ.get(COMPLETE))


def complete(command: Any) -> int:
    """Print what may come next on the line that the shell shows; returns the exit code that its script reads."""
    completion.get_completion_inspect_parameters()  # makes the shells known
    return _code(completion.shell_complete, command, {}, "mmpack", COMPLETE, os.environ[COMPLETE])


def _version(version: bool) -> None:
    if version:
        print(f"mmpack {__version__}")
        raise typer.Exit


def _install(ctx: typer.Context, param: typer.CallbackParam, shell: Shell | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        raise typer.Exit(_code(completion.install_callback, ctx, param, str(shell)))


def _show(ctx: typer.Context, param: typer.CallbackParam, shell: Shell | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        raise typer.Exit(_code(completion.show_callback, ctx, param, str(shell)))


def _code(function: Callable[..., Any], *args: Any) -> int:
    """typer's functions end the process."""
    try:
        return int(function(*args) or 0)
    except SystemExit as error:
        return int(error.code or 0)


def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_version),
    ] = False,
    install_completion: Annotated[
        Shell | None,
        typer.Option(
            metavar="SHELL",
            is_eager=True,
            callback=_install,
            help="Make Tab complete commands and options in bash, zsh or fish.",
        ),
    ] = None,
    show_completion: Annotated[
        Shell | None,
        typer.Option(
            metavar="SHELL",
            is_eager=True,
            callback=_show,
            help="Print the script that completes in bash, zsh or fish.",
        ),
    ] = None,
) -> None:
    """The options of `mmpack` itself."""
