"""HTML tags as nested calls. Attributes and texts are escaped here and nowhere else."""

from __future__ import annotations

from typing import Any

from mmpack.errors import needs, one_line

with needs("view", "an HTML report"):
    from markupsafe import Markup, escape

__all__ = ["Markup", "escape", "joined", "table", "tag", "text"]

VOID = ("br",)


def text(value: Any) -> Markup:
    """A value as escaped text, control characters included; Markup as it is; nothing for None."""
    if isinstance(value, Markup):
        return value
    return Markup("") if value is None else escape(one_line(str(value)))


def tag(name: str, *inner: Any, **attributes: Any) -> Markup:
    """`<name attribute="…">inner</name>`; `class_` for class, `view_box` for viewBox; None leaves an attribute out."""
    names = {"class_": "class", "view_box": "viewBox"}
    given = "".join(
        f' {names.get(key, key).replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(inner)}</{name}>")


def joined(parts: Any) -> Markup:
    """Several values as one text."""
    return Markup("").join(text(part) for part in parts)


def table(
    head: tuple[str, ...], rows: list[Any], class_: str | None = None, label: str | None = None
) -> Markup:
    """A table that scrolls by itself where the page is narrow, by keys too. `label`: its name; its columns if None."""
    top = tag("tr", *(tag("th", name) for name in head))
    body = (tag("tr", *(tag("td", value) for value in row)) for row in rows)
    name = label or f"table: {', '.join(filter(None, head))}"
    options = {"class_": "wide", "tabindex": "0", "role": "group", "aria_label": name}
    return tag("div", tag("table", top, *body, class_=class_), **options)
