"""The reference of public names, as pages of Markdown in docs/api/, which git ignores: one per room.

A name's entry is its signature and its docstring; a class's also its public methods and properties.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docstrings import markdown

import mmpack
from mmpack.exports import homes

# title -> first parts of the modules that names of `mmpack` itself come from
PAGES = {
    "traces": ("Traces and samples", ("schema", "families")),
    "processors": ("Processors and positions", ("processors", "layout")),
    "plan_and_pack": ("Planning and packing", ("planning", "packing")),
    "operators": ("Operators", ("ops",)),
    "losses_and_rewards": ("Losses, advantages and rewards", ("losses",)),
    "compare": ("Parity", ("parity",)),
    "metrics": ("Metrics", ("logged",)),
    "exceptions": ("Errors and warnings", ("errors",)),
}
ROOMS = (
    *(name for name, home in homes("mmpack").items() if home == "mmpack"),
    *("adapters.transformers", "adapters.torch", "adapters.trl"),
)


def version() -> str:
    return mmpack.__version__


def write(folder: Path) -> set[str]:
    """Write the pages; returns the full names that have an entry. A page that says the same is left alone."""
    folder.mkdir(exist_ok=True)
    known: set[str] = set()
    made: dict[str, str] = {}
    titles: dict[str, str] = {}
    room_of = {name: f"{home}..".split(".")[1] for name, home in homes("mmpack").items()}
    for page, (title, parts) in PAGES.items():
        names = [name for name in mmpack.__all__ if room_of[name] in parts]
        found = {name: getattr(mmpack, name) for name in names}
        made[page] = f"# {title}\n\n{within('mmpack')}" + "\n".join(entries("mmpack", found, known))
        titles[page] = title
    for room in ROOMS:
        module = importlib.import_module(f"mmpack.{room}")
        page = room.replace(".", "_")
        head = f"# `mmpack.{room}`\n\n{markdown(module.__doc__ or '')}\n{within(f'mmpack.{room}')}"
        made[page] = head + "\n".join(entries(f"mmpack.{room}", public(module), known))
        titles[page] = f"`mmpack.{room}`"
    links = "\n".join(f"- [{title}]({page}.md)" for page, title in titles.items())
    tree = "\n".join(made)
    made["index"] = (
        "# API\n\nEvery public name, from its docstring. `import mmpack as mp` makes each of them `mp.NAME`.\n\n"
        f"{links}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    )
    for page, text in made.items():
        path = folder / f"{page}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.stem not in made:
            path.unlink()
    return known


def within(module: str) -> str:
    """Names of types are looked for here first: two rooms may have one of the same name."""
    return f"```{{py:currentmodule}} {module}\n```\n\n"


def public(module: ModuleType) -> dict[str, Any]:
    """Name -> value of what a room says is public, or else of what it imports from mmpack's files."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in sorted(names)}
    return {
        name: value
        for name, value in found.items()
        if getattr(value, "__module__", "").startswith("mmpack.")
    }


def entries(where: str, values: dict[str, Any], known: set[str]) -> Iterator[str]:
    for name, value in values.items():
        full = f"{where}.{name}"
        known.add(full)
        kind = "class" if inspect.isclass(value) else "function"
        if inspect.isclass(value) and issubclass(value, BaseException):
            kind = "exception"
        elif not callable(value):
            kind = "data"
        # a heading per name, for the list at the side of the page
        yield f"## {name}\n"
        yield from entry(kind, full, value, known)


def entry(kind: str, full: str, value: Any, known: set[str]) -> Iterator[str]:
    text = inspect.getdoc(value) if kind != "data" else ""
    name = full.rpartition(".")[2]
    yield "````````{py:" + kind + "} " + name + (signature(value) if kind != "data" else "")
    yield ":no-contents-entry:\n"
    yield markdown(text or "")
    if kind == "class":
        for name, member in members(value):
            known.add(f"{full}.{name}")
            is_property = isinstance(member, property)
            yield (
                "``````{py:"
                + ("property" if is_property else "method")
                + "} "
                + (name if is_property else name + signature(member))
            )
            if isinstance(member, classmethod | staticmethod):
                yield f":{type(member).__name__}:"
            yield ":no-contents-entry:\n"
            yield markdown(inspect.getdoc(member) or "")
            yield "``````\n"
    yield "````````\n"


def members(value: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings, of the class and of its bases in mmpack."""
    seen: set[str] = set()
    for base in value.__mro__:
        if not base.__module__.startswith("mmpack"):
            continue
        for name, member in vars(base).items():
            plain = inspect.isfunction(member) or isinstance(
                member, property | classmethod | staticmethod
            )
            if name.startswith("_") or name in seen or not plain or not member.__doc__:
                continue
            seen.add(name)
            yield name, member


class Text:
    """What prints as it was written, in a signature."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(value: Any) -> str:
    """Of a callable, with annotations as they are in the source."""
    bound = isinstance(value, classmethod)
    value = getattr(value, "__func__", value)
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    parameters = list(found.parameters.values())
    if parameters and (bound or parameters[0].name == "self"):
        parameters = parameters[1:]
    shown = []
    for parameter in parameters:
        if parameter.annotation is not parameter.empty:
            parameter = parameter.replace(annotation=annotation(parameter.annotation))
        if parameter.default is not parameter.empty and "<" in repr(parameter.default):
            parameter = parameter.replace(default=Text("..."))
        shown.append(parameter)
    returns = found.return_annotation
    if inspect.isclass(value):
        returns = found.empty
    elif returns is not found.empty:
        returns = annotation(returns)
    return str(found.replace(parameters=shown, return_annotation=returns)).replace("\n", " ")


def annotation(value: Any) -> Text:
    return Text(value if isinstance(value, str) else inspect.formatannotation(value))
