"""Registry of what draws objects of rooms above `mmpack.view`; loaded when first used."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from mmpack.errors import MissingExtraError

_registered: dict[str, Callable[..., Any]] = {}
_loaders: list[Callable[[], object]] = []


def register(**functions: Callable[..., Any]) -> None:
    """Register functions that draw: `card` for notebooks, others by name."""
    _registered.update(functions)


def load_with(loader: Callable[[], object]) -> None:
    """Set `loader`, which imports the module that calls `register`."""
    _loaders[:] = [loader]


def drawer(name: str) -> Callable[..., Any]:
    """The function of this name. Raises: MissingExtraError without the packages that it needs."""
    if name not in _registered:
        _loaders[0]()
    return _registered[name]


class Drawn:
    """Base class: adds `_repr_html_`."""

    def _repr_html_(self) -> str:
        """A fragment of HTML; without Jinja2 the text, and how to get the rest."""
        try:
            return str(drawer("card")(self))
        except MissingExtraError as error:
            text = self.summary() if hasattr(self, "summary") else repr(self)
            return f"<pre>{escape(text):.2000}\n{escape(str(error))}</pre>"
