"""Options of commands: a parameter's help and metavar are its line of the docstring, `name [METAVAR]: help`."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

_ENTRY = re.compile(r"^    (\w+)(?: \[(.+?)\])?: (.*(?:\n        .*)*)", re.MULTILINE)


def documented(function: Callable[..., Any]) -> str:
    """Give the function the signature that typer makes its command line of; returns the help of the command.

    Parameters without a default are arguments, others options, flags have no `--no-`; unless `Annotated` says else.
    """
    about, _, entries = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    said = {
        name: (metavar, " ".join(text.split())) for name, metavar, text in _ENTRY.findall(entries)
    }
    if "__signature__" not in vars(function):
        hints = get_type_hints(function, include_extras=True)
        given = inspect.signature(function).parameters.values()
        found = [_parameter(p, hints[p.name], *said.pop(p.name, ("", ""))) for p in given]
        assert not said, f"{function.__module__}: no such options: {sorted(said)}"
        function.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return about


def _parameter(given: inspect.Parameter, hint: Any, metavar: str, text: str) -> inspect.Parameter:
    kind, *more = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    info = next((copy.copy(m) for m in more if isinstance(m, ParameterInfo)), None)
    if info is None:
        flag = [f"--{given.name.replace('_', '-')}"] if kind is bool else []
        required = given.default is inspect.Parameter.empty
        info = typer.Argument() if required else typer.Option(*flag)
    info.help, info.metavar = text or info.help, metavar or info.metavar
    return given.replace(annotation=Annotated[kind, info])
