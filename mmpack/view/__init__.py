"""HTML and PNG of what mmpack makes. Importing it gives reports their `to_html` and their look in a notebook.

Everything that draws is loaded when it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

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
    """
    from mmpack.view.parity.page import page

    return page(
        report,
        media_root=media_root,
        known=pictures,
        decode=decode,
        train_logprobs=train_logprobs,
    )


def _notebook(report: ParityReport) -> str:
    from mmpack.view.parity.page import fragment

    return fragment(report)


ParityReport.to_html = html  # type: ignore[method-assign]
ParityReport._repr_html_ = _notebook  # type: ignore[method-assign]
