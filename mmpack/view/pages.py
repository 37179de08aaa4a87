"""The HTML of parts: pages that are one file each, run no script of others and load nothing; fragments for notebooks.

What a template writes of a value is escaped text, control characters included; only Markup stays as it is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmpack.errors import needs, one_line
from mmpack.view.media import data_uri
from mmpack.view.parts import Drawing, Part

with needs("view", "an HTML report"):
    import jinja2
    from markupsafe import Markup, escape

# names of markupsafe that others import from here, where a missing package is named
__all__ = ["Markup", "escape"]

_TEMPLATES = Path(__file__).parent / "templates"


def _text(value: Any) -> Markup:
    """A value as escaped text; Markup as it is; nothing for None."""
    if isinstance(value, Markup):
        return value
    return Markup("") if value is None else escape(one_line(str(value)))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    autoescape=True,
    finalize=_text,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.globals |= {"kind": lambda x: type(x).__name__, "n": _number, "data_uri": data_uri}


def asset(*names: str) -> str:
    """Style sheets or scripts of these names, one after the other."""
    return "".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in names)


STYLE = asset("parts.css", "drawings.css")


def template(name: str) -> Any:
    """The macros of a template."""
    return _environment.get_template(name).module


def written(parts: Iterable[Part]) -> Markup:
    """The parts as HTML."""
    return Markup(template("parts.html").written(list(parts)))


def svg(drawing: Drawing) -> Markup:
    """A drawing as SVG."""
    return Markup(template("parts.html").svg(drawing))


def fragment(parts: Iterable[Part]) -> str:
    """The parts with their style, for a notebook."""
    return f'<div class="mmpack"><style>{STYLE}</style>{written(parts)}</div>'


def page(title: str, parts: Iterable[Part]) -> str:
    """The parts as one self-contained page."""
    return document(title, STYLE, written(parts))


def document(title: str, style: str, body: Markup, script: str = "") -> str:
    """A page of which the browser's policy allows its own style and script, by hash, and `data:` pictures."""
    policy = f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
    policy += f"script-src '{_digest(script)}'; " if script else ""
    policy += "base-uri 'none'; form-action 'none'"
    parts = {"policy": Markup(policy), "style": Markup(style), "script": Markup(script)}
    return str(template("document.html").document(title, body, **parts)) + "\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
