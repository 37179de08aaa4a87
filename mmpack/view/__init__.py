"""HTML and PNG of what mmpack makes. `mp.compare` imports this room, so that its reports show themselves in a notebook.

`ParityReport` is below this room in the import order: it declares `to_html` and `_repr_html_`, which are set here.
What draws is loaded on first use: it needs optional packages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from mmpack.errors import ArgumentError, MissingExtraError, kind_of
from mmpack.parity.report import ParityReport

if TYPE_CHECKING:
    import numpy as np

__all__ = ["html"]


def html(
    report: ParityReport,
    media_root: str | os.PathLike[str] | None = None,
    pictures: Mapping[str, np.ndarray] | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    train_logprobs: Mapping[str, np.ndarray] | None = None,
) -> str:
    """A parity report as one self-contained page; everything that came from a trace is escaped.

    Args:
        media_root: folder below which the pictures and videos that `Medium.source` names are opened.
        pictures: content_hash -> uint8 [h, w, 3] of pictures in memory, [n, h, w, 3] of the sampled frames of videos.
        decode: ids -> text, for the tokens around a difference.
        train_logprobs: sample_id -> the trainer's logprobs [n] (natural log), where its trace doesn't hold them.

    Raises: ArgumentError for what is no report; MissingExtraError without MarkupSafe, and without Pillow where pictures
    are drawn.

    Example:
        >>> import mmpack as mp
        >>> report = mp.compare([], [])
        >>> mp.view.html(report)[:15], "Not compared" in mp.view.html(report)
        ('<!doctype html>', True)
    """
    if not isinstance(report, ParityReport):
        raise ArgumentError(
            f"view.html: the report is {kind_of(report)}, expected a ParityReport. Fix: pass what mp.compare returns"
        )
    from mmpack.view.parity.page import page

    return page(
        report,
        media_root=media_root,
        known=pictures,
        decode=decode,
        train_logprobs=train_logprobs,
    )


def _notebook(report: ParityReport) -> str:
    """What a notebook shows; where the package for HTML is missing, the summary and how to get the rest."""
    try:
        from mmpack.view.parity.page import fragment
    except MissingExtraError as error:
        return f"<pre>{escape(report.summary())}\n{escape(str(error))}</pre>"
    return fragment(report)


ParityReport.to_html = html
ParityReport._repr_html_ = _notebook
