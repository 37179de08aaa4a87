"""A page that is one file: it runs no script and loads nothing, and its policy says so to the browser."""

from __future__ import annotations

import base64
import hashlib

from mmpack.view.tags import Markup, tag


def document(title: str, style: str, body: Markup, *, pictures: bool = False) -> str:
    """The whole page. `pictures`: whether the body has any, as `data:` addresses."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    images = " img-src data:;" if pictures else ""
    policy = f"default-src 'none';{images} style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{tag('title', title)}<style>{style}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body class="mmpack">{body}</body></html>\n'
