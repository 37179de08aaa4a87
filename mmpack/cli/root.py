"""What every subcommand shares: options from docstrings, completion by the shell, and that no input is overwritten.

The script of a shell runs `mmpack` with `_MMPACK_COMPLETE` set each time that Tab is pressed.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer import completion
from typer.core import TyperCommand
from typer.models import ParameterInfo

from mmpack._version import __version__
from mmpack.cli.output import OUTPUTS, JsonOption, OutOption, Result, emit, refuse_shared
from mmpack.errors import ArgumentError
from mmpack.files import Identity, identity, inputs_kept

COMPLETE = "_MMPACK_COMPLETE"
Shell = Literal["bash", "zsh", "fish"]
# an option in a docstring: a line `name [METAVAR]: help`, and the lines that go on
_ENTRY = re.compile(r"^    (\w+)(?: \[(.+?)\])?: (.*(?:\n        .*)*)", re.MULTILINE)
CHECKPOINT = ("config.json", "tokenizer_config.json", "preprocessor_config.json")


class Command(TyperCommand):
    """A subcommand: a file that is named on its line and not declared as an output is never overwritten."""

    def invoke(self, ctx: Any) -> Any:
        outputs = ctx.meta.get(OUTPUTS, {})
        read: dict[Identity, str] = {}
        for param in self.params:
            if param.name not in outputs and param.metavar != "ID":
                name = param.metavar if param.param_type_name == "argument" else param.opts[-1]
                read |= dict.fromkeys(_files(ctx.params.get(param.name)), str(name))
        for param in self.params:
            found = identity(outputs[param.name]) if param.name in outputs else None
            if found in read:
                raise ArgumentError(
                    f"{self.name}: {outputs[param.name].name!r:.60} is {read[found]}, which this command reads. "
                    "Fix: write to another file"
                )
            path = outputs.get(param.name)
            if path is not None and param.metavar == "FILE.png" and path.suffix.lower() != ".png":
                raise ArgumentError(
                    f"{self.name}: {param.opts[-1]} {path.name!r:.60} is not a .png file. "
                    "Fix: pass a name ending in .png"
                )
        refuse_shared(str(self.name), *outputs.values())
        with inputs_kept(read):
            return super().invoke(ctx)


def _files(value: Any) -> Iterator[Identity]:
    """The files that an argument's value names: by itself, as KIND:NAME?options, or as a checkpoint's folder."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _files(one)
    if not isinstance(value, str | Path):
        return
    for text in {str(value), str(value).partition(":")[2].partition("?")[0]} - {""}:
        path = Path(text)
        inside: list[Path] = []
        if any(identity(path / name) for name in CHECKPOINT):
            inside = list(path.iterdir())
        yield from (found for file in (path, *inside) if (found := identity(file)))


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
        raise typer.Exit(_code(completion.install_callback, ctx, param, shell))


def _show(ctx: typer.Context, param: typer.CallbackParam, shell: Shell | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        raise typer.Exit(_code(completion.show_callback, ctx, param, shell))


def _code(function: Callable[..., Any], *args: Any) -> int:
    """typer's functions end the process."""
    try:
        return int(function(*args) or 0)
    except SystemExit as error:
        return int(error.code or 0)


def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version)] = False,
    install_completion: Annotated[
        Shell | None, typer.Option(is_eager=True, callback=_install)
    ] = None,
    show_completion: Annotated[Shell | None, typer.Option(is_eager=True, callback=_show)] = None,
) -> None:
    """The options of `mmpack` itself.

    Args:
        version: Show the version.
        install_completion [SHELL]: Make Tab complete commands and options in bash, zsh or fish.
        show_completion [SHELL]: Print the script that completes in bash, zsh or fish.
    """


def add(app: typer.Typer, name: str, function: Callable[..., Any]) -> None:
    """Add a subcommand; its options and its examples are those of the docstring."""
    about, examples = documented(function)
    epilog = "\n\n".join([f"Example{'s' if len(examples) > 1 else ''}:", *examples])
    made = _with_output(function) if function.__annotations__["return"] == "Result" else function
    app.command(name, help=about, cls=Command, epilog=epilog)(made)


def _with_output(function: Callable[..., Result]) -> Callable[..., int]:
    """A command that prints its Result, with the options of `command` that it does not have itself."""
    given = inspect.signature(function).parameters

    def command(*, as_json: JsonOption = False, out: OutOption = None, **own: Any) -> int:
        shared = {"as_json": as_json, "out": out}
        result = function(**own, **{name: shared[name] for name in shared.keys() & given})
        return emit(result, as_json, out)

    documented(command)
    *more, _ = inspect.signature(command).parameters.values()
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*given.values(), *(p for p in more if p.name not in given)]
    )
    return command


def documented(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """Give the function the signature that typer makes its command line of; returns its help and its examples.

    Parameters without a default are arguments, others options, flags have no `--no-`; unless `Annotated` says else.
    """
    text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
    about, _, entries = text.partition("\n\nArgs:\n")
    said = {
        name: (metavar, " ".join(text.split())) for name, metavar, text in _ENTRY.findall(entries)
    }
    if "__signature__" not in vars(function):
        hints = get_type_hints(function, include_extras=True)
        given = inspect.signature(function).parameters.values()
        found = [_parameter(p, hints[p.name], *said.pop(p.name, ("", ""))) for p in given]
        assert not said, f"{function.__module__}: no such options: {sorted(said)}"
        function.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return about, [line.strip() for line in examples.splitlines()]


def _parameter(given: inspect.Parameter, hint: Any, metavar: str, text: str) -> inspect.Parameter:
    kind, *more = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    info = next((copy.copy(m) for m in more if isinstance(m, ParameterInfo)), None)
    if info is None:
        flag = [f"--{given.name.replace('_', '-')}"] if kind is bool else []
        required = given.default is inspect.Parameter.empty
        info = typer.Argument() if required else typer.Option(*flag)
    info.help, info.metavar = text or info.help, metavar or info.metavar
    return given.replace(annotation=Annotated[kind, info])
