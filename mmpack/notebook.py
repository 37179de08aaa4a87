"""How notebooks display an object: `Drawn` has the `_repr_html_`, which loads `mmpack.view` only when called."""

from __future__ import annotations

import importlib
from html import escape

from mmpack.errors import MissingExtraError


class Drawn:
    """A base that has nothing but its look in a notebook."""

    def _repr_html_(self) -> str:
        """A fragment of HTML; without MarkupSafe the text, and how to get the rest."""
        try:
            cards = importlib.import_module("mmpack.view.cards")
        except MissingExtraError as error:
            return f"<pre>{escape(repr(self)):.2000}\n{escape(str(error))}</pre>"
        return str(cards.card(self))
