"""Pages that are made of parts, as one file each."""

from __future__ import annotations

from collections.abc import Sequence

from mmpack.view.document import document
from mmpack.view.parity.style import STYLE
from mmpack.view.parts import Part, written


def page(title: str, parts: Sequence[Part]) -> str:
    """One self-contained page that runs no script and loads nothing.

    Raises: MissingExtraError without MarkupSafe.
    """
    return document(title, STYLE, written(parts))
