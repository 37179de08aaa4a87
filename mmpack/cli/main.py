"""`mmpack`: finds the subcommand, and is the one place that turns errors into a line and an exit code.

0 fine; 1 a difference, a broken rule or a failed check; 2 bad input or bad usage; 130 interrupted.
Each subcommand is the function `command` of the module of its name. It returns its exit code, and imports the rooms
that it needs when it runs.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mmpack.errors import MmpackError, no_command, one_line, require
from mmpack.files import FIXES

COMMANDS = (
    "init", "smoke", "parity", "explain", "probe", "validate", "inspect", "convert", "view", "plan", "frames", "doctor",
    "schema",
)  # fmt: skip
ABOUT = "The data layer of multimodal RL: check, pack, plan and draw its samples."
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + signal, as shells count


def main(
    args: Sequence[str] | None = None,
    command: Callable[..., int] | None = None,
    name: str = "mmpack",
) -> int:
    """Run the command line `args` (by default the process's own) and return its exit code.

    `command`: the function of another program, called `name`, that wants the same errors and exit codes.
    """
    heard = logging.StreamHandler()  # stderr
    heard.setFormatter(logging.Formatter("mmpack: %(message)s"))
    logging.getLogger("mmpack").addHandler(heard)
    try:
        made = build() if command is None else _single(command)
        code = _run(list(sys.argv[1:] if args is None else args), made, name)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return PIPE_CLOSED
    except MmpackError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("this machine is out of memory. Fix: split the file, or use a larger machine")
    except OSError as error:
        _discard_stdout()
        at = "" if error.filename is None else f"{str(error.filename)[-120:]!r}: "
        fix = FIXES.get(error.errno or 0, "check the path, its folder and their permissions")
        return _fail(f"{at}{error.strerror or error}. Fix: {fix}")
    finally:
        logging.getLogger("mmpack").removeHandler(heard)


def build() -> Any:
    """The command with all subcommands, as an object of click.

    Raises: MissingExtraError without typer or rich.
    """
    typer = require("typer", "cli", "the command mmpack")
    require("rich", "cli", "the command mmpack")
    from mmpack.cli import root

    app = typer.Typer(
        help=ABOUT,
        epilog="Exit codes: 0 fine; 1 a difference, a broken rule or a failed check; 2 bad input or bad usage.",
        add_completion=False,  # typer's options ask which shell runs this, which a pipe can't say
    )
    root.documented(root.options)
    app.callback(help=ABOUT)(root.options)
    for name in COMMANDS:
        root.add(app, name, importlib.import_module(f"mmpack.cli.{name}").command)
    return typer.main.get_command(app)


def _single(command: Callable[..., int]) -> Any:
    typer = require("typer", "cli", "this command")
    from mmpack.cli.root import Command

    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(command)
    return typer.main.get_command(app)


def _run(args: list[str], command: Any, name: str) -> int:
    typer: Any = importlib.import_module("typer")
    root: Any = importlib.import_module("mmpack.cli.root")
    if root.completes():
        return int(root.complete(command))
    if isinstance(sys.stdout, io.TextIOWrapper):  # else there is none, or a caller's own
        sys.stdout.reconfigure(errors="backslashreplace")
    usage_error = typer.BadParameter.__mro__[1]  # click's, or the copy of it inside typer
    try:
        # not command.main(): it prints errors over several lines, and a closed pipe exits 1
        with command.make_context(name, args) as context:
            return int(command.invoke(context))
    except typer.Exit as error:  # --help, --version
        return int(error.exit_code)
    except usage_error as error:
        path = error.ctx.command_path if error.ctx else name
        return _fail(f"{_usage(error.format_message())} Fix: see `{path} --help`")


def _usage(message: str) -> str:
    """A usage error in one sentence, without the words of the parser in front of what is wrong."""
    text = " ".join(message.split()).removeprefix("Invalid value: ").replace("Value error, ", "")
    return text if text.endswith("?") else f"{text.rstrip('.')}."


def _fail(message: str) -> int:
    print(no_command(f"mmpack: {one_line(message)}"), file=sys.stderr)
    return 2


def _discard_stdout() -> None:
    """What is still buffered can't be written: keep the interpreter from trying it again at exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
