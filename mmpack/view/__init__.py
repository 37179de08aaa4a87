"""HTML pages and PNG figures of mmpack's objects, and their look in notebooks, which is registered here.

What draws is loaded on first use: it needs optional packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from mmpack.errors import ArgumentError, kind_of
from mmpack.notebook import register
from mmpack.parity.report import ParityReport
from mmpack.planning.planned import Plan

if TYPE_CHECKING:
    import numpy as np

    from mmpack.packing.batch import Batch
    from mmpack.parity.drift import LogprobDrift
    from mmpack.schema.sample import Sample
    from mmpack.view.parts import Part

__all__ = ["drift_png", "html", "png"]

LIMIT = 100  # samples of a page
FIGURE_LIMIT = 8  # samples of a figure


def html(
    what: ParityReport | Plan | Batch | Iterable[Sample],
    media_root: str | os.PathLike[str] | None = None,
    pictures: Mapping[str, np.ndarray] | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    train_logprobs: Mapping[str, np.ndarray] | None = None,
    *,
    tokenizer: Any = None,
    title: str | None = None,
    limit: int | None = None,
    drift: LogprobDrift | None = None,
) -> str:
    """A parity report, a plan, a batch or samples, as one self-contained page; all that came from a trace is escaped.

    Samples are drawn by trajectory, in order of turn: their screens with boxes, clicks and paths, their tokens by what
    they are, rewards and costs on their tokens. A sample that goes on from another draws only what is new.

    Args:
        what: a ParityReport, a Plan (its ranks as lanes), a PackedBatch or PaddedBatch (its rows and forest, what
            sharing saves, histograms), or samples (a list, `mp.read_trace(path)`).
        media_root: folder below which the pictures and videos that `Medium.source` names are opened.
        pictures: content_hash -> uint8 [h, w, 3] of pictures in memory, [n, h, w, 3] of the sampled frames of videos.
        decode: of a report: ids -> text, for the tokens around a difference.
        train_logprobs: of a report: sample_id -> the trainer's logprobs [n] (natural log), where its trace doesn't hold
            them.
        tokenizer: of samples: of transformers, or a function from an id to its bytes. Without one, texts are those of
            `Sample.metadata["token_texts"]` (L strings) if there are any, else ids.
        title: of samples, of a plan and of a batch: the heading, "samples", "plan" and "pack" if not given.
        limit: of samples: how many are drawn, 100 if not given; the page says that there are more.
        drift: of a report: the drift of all samples (`parity.drift_traces.trace_drift`); if not given, that of the
            samples drawn.

    Raises: ArgumentError for another `what`, and for an option that is not of it; MissingExtraError without Jinja2,
    and without Pillow where pictures are drawn.

    Example:
        >>> import mmpack as mp
        >>> report = mp.compare([], [])
        >>> mp.view.html(report)[:15], "Not compared" in mp.view.html(report)
        ('<!doctype html>', True)
        >>> ids, loss = [5, 6, 7], [mp.LossSpan(1, 3, "action", turn=0)]
        >>> sample = mp.Sample("s", "g", "qwen2_vl", ids, media=[], modality_spans=[], loss_spans=loss)
        >>> "action, turn 0, loss, tokens 1 to 3" in mp.view.html([sample])
        True
    """
    _refuse_file(media_root, "html")
    if isinstance(what, ParityReport):
        _refuse("a report", tokenizer=tokenizer, title=title, limit=limit)
        from mmpack.view.pages import page
        from mmpack.view.parity.parts import report_parts

        checked = _checked_drift(drift, "view.html")
        parts = report_parts(what, media_root, pictures, decode, train_logprobs, checked)
        return page("mmpack parity", parts)
    if isinstance(what, Plan) or _is_batch(what):
        of_samples = {"media_root": media_root, "pictures": pictures, "tokenizer": tokenizer}
        of_report = {"decode": decode, "train_logprobs": train_logprobs, "drift": drift}
        _refuse(_kind(what), **of_samples, **of_report, limit=limit)
        from mmpack.view.pages import page

        return page(*_parts(what, title))
    if not isinstance(what, Iterable) or isinstance(what, (str, bytes, Mapping)):
        raise ArgumentError(
            f"view.html: what to draw is {kind_of(what)}, expected samples, a batch, a ParityReport or a Plan. "
            "Fix: pass what mp.read_trace, mp.pack, mp.compare or mp.plan returns, [sample] for one sample"
        )
    _refuse("samples", decode=decode, train_logprobs=train_logprobs, drift=drift)
    from mmpack.view.trace.choose import checked_options, choose
    from mmpack.view.trace.page import page as trace_page

    options = checked_options("view.html", media_root, pictures, tokenizer, title)
    chosen = choose(what, "view.html", LIMIT if limit is None else limit)
    return trace_page(chosen.samples, chosen.note, options)[0]


def _is_batch(what: Any) -> TypeGuard[Batch]:
    """Torch is not loaded to ask."""
    module = sys.modules.get("mmpack.packing.batch")
    return module is not None and isinstance(what, module.Batch)


def _parts(what: Any, title: str | None) -> tuple[str, list[Part]]:
    """Title and parts of a plan or of a batch."""
    if title is not None and not isinstance(title, str):
        raise ArgumentError(f"view: title is {kind_of(title)}, expected a text. Fix: pass a str")
    if isinstance(what, Plan):
        from mmpack.view.plan import plan_parts

        name = "plan" if title is None else title
        return name, plan_parts(what, name)
    from mmpack.view.batch import batch_parts

    name = "pack" if title is None else title
    return name, batch_parts(what, name)


def _kind(what: Plan | Batch) -> str:
    return "a plan" if isinstance(what, Plan) else "a batch"


def png(
    what: ParityReport | Plan | Batch | Iterable[Sample],
    media_root: str | os.PathLike[str] | None = None,
    pictures: Mapping[str, np.ndarray] | None = None,
    *,
    tokenizer: Any = None,
    title: str | None = None,
    limit: int | None = None,
    drift: LogprobDrift | None = None,
) -> bytes:
    """A parity report, a plan, a batch or samples as a figure for a paper, a PNG in light colours.

    Samples: screens, a bar of all tokens, what was written, 2,880 pixels wide. Others, 2,160 pixels wide: what their
    pages show, without the tables that open there.

    Args: as of `html`; `limit` is 8 if not given. Characters that Pillow's own font lacks are drawn as their escapes.
    Raises: ArgumentError; MissingExtraError without Pillow.

    Example:
        >>> import mmpack as mp
        >>> loss = [mp.LossSpan(1, 2)]
        >>> sample = mp.Sample("s", "g", "qwen2_vl", [5, 6], media=[], modality_spans=[], loss_spans=loss)
        >>> mp.view.png([sample])[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
    """
    _refuse_file(media_root, "png")
    of_samples = {"media_root": media_root, "pictures": pictures, "tokenizer": tokenizer}
    if isinstance(what, ParityReport):
        _refuse("a report", "view.png", **of_samples, title=title, limit=limit)
        from mmpack.view.figures import figure
        from mmpack.view.parity.parts import FIGURE_CARDS, report_parts

        checked = _checked_drift(drift, "view.png")
        return figure(report_parts(what, drift=checked, samples=FIGURE_CARDS))
    if isinstance(what, Plan) or _is_batch(what):
        _refuse(_kind(what), "view.png", **of_samples, limit=limit, drift=drift)
        from mmpack.view.figures import figure

        return figure(_parts(what, title)[1])
    _refuse("samples", "view.png", drift=drift)
    from mmpack.view.trace.choose import checked_options, choose
    from mmpack.view.trace.figure import figure as trace_figure

    options = checked_options("view.png", media_root, pictures, tokenizer, title)
    chosen = choose(
        cast("Iterable[Sample]", what), "view.png", FIGURE_LIMIT if limit is None else limit
    )
    return trace_figure(chosen.samples, chosen.note, options)[0]


def drift_png(drift: LogprobDrift, title: str = "Drift of logprobs") -> bytes:
    """A drift by axis as a figure for a paper, a PNG of 2,160 pixels width: bars of mean |train − rollout| by group.

    Args: `drift`: of `parity.drift.logprob_drift` or `parity.drift_traces.trace_drift`. Raises: ArgumentError;
    MissingExtraError without Pillow.

    Example:
        >>> import mmpack as mp, numpy as np
        >>> from mmpack.parity.drift import logprob_drift
        >>> rolled = np.float32([-1, -2])
        >>> sample = mp.Sample("s", "g", "qwen2_vl", np.arange(4), [], [], [mp.LossSpan(2, 4)], rollout_logprobs=rolled)
        >>> mp.view.drift_png(logprob_drift([sample], [rolled + 0.5]))[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
    """
    from mmpack.view.figures import figure
    from mmpack.view.parity.drift import drift_figure

    if _checked_drift(drift, "view.drift_png") is None:
        raise ArgumentError("view.drift_png: drift is None. Fix: pass what logprob_drift returns")
    if not isinstance(title, str):
        raise ArgumentError(f"view.drift_png: title is {kind_of(title)}. Fix: pass a str")
    return figure(drift_figure(drift, title))


def _checked_drift(drift: LogprobDrift | None, what: str) -> LogprobDrift | None:
    from mmpack.parity.drift import LogprobDrift

    if drift is not None and not isinstance(drift, LogprobDrift):
        raise ArgumentError(
            f"{what}: drift is {kind_of(drift)}, expected a LogprobDrift. Fix: pass what logprob_drift returns"
        )
    return drift


def _refuse(what: str, where: str = "view.html", /, **options: Any) -> None:
    """Raise ArgumentError for options that don't apply to `what`."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"{where}: {name} is no option for {what}. Fix: leave it out")


def _refuse_file(media_root: Any, kind: str) -> None:
    """Raise ArgumentError for the name of a file to write, where the folder of pictures belongs."""
    if str(media_root).lower().endswith(f".{kind}"):
        write = "write_bytes" if kind == "png" else "write_text"
        raise ArgumentError(
            f"view.{kind}: media_root is {str(media_root)!r:.120}, expected the folder of sources; view.{kind} returns "
            f"what a file should hold. Fix: call Path({str(media_root)!r:.120}).{write}(mp.view.{kind}(…))"
        )


def _later(name: str) -> Callable[..., Any]:
    """A function whose module is loaded when it is called."""
    return lambda *args, **options: resolve_name(f"mmpack.view.{name}")(*args, **options)


_PROBE = {f"probe_{form}": _later(f"probe:{form}") for form in ("html", "png")}
register(card=_later("cards:card"), html=html, **_PROBE)
