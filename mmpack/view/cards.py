"""What a notebook shows of a sample, a plan, a batch, a loss or a report."""

from __future__ import annotations

from typing import Any

from mmpack.parity.report import ParityReport
from mmpack.planning.planned import Plan
from mmpack.schema.sample import Sample
from mmpack.view.batch import batch_parts
from mmpack.view.pages import fragment
from mmpack.view.parts import Heading, Key, Line, Part, Table
from mmpack.view.plan import short_parts
from mmpack.view.strips import BY_MODALITY, sample_strip
from mmpack.view.trace.roles import ROLES, roles_of


def card(what: Any) -> str:
    """A fragment for a notebook.

    Raises: MissingExtraError without Jinja2.
    """
    return fragment(_parts(what))


def _parts(what: Any) -> list[Part]:
    if isinstance(what, Sample):
        return _sample(what)
    if isinstance(what, Plan):
        return short_parts(what)
    if isinstance(what, ParityReport):
        from mmpack.view.parity.parts import report_parts

        return report_parts(what)
    if hasattr(what, "metrics"):
        return _loss(what)
    if hasattr(what, "modules"):  # a ProbeReport, without loading torch to ask
        from mmpack.view.probe import report_parts as probe_parts

        return probe_parts([what])
    return batch_parts(what)


def _sample(sample: Sample) -> list[Part]:
    roles = roles_of(sample)
    facts = [
        ("family", sample.family),
        ("group", sample.group_id),
        ("tokens", f"{len(sample):,}"),
        ("in the loss", f"{sample.num_loss_tokens:,}"),
        ("media", f"{len(sample.media):,} ({sample.num_patches:,} patches)"),
        *((f"reward {s.name}", f"{s.value:g}") for s in sample.rewards or ()),
    ]
    strip, more = sample_strip(sample.sample_id, roles, BY_MODALITY.__getitem__)
    used = dict.fromkeys(roles.role.tolist())
    note = "A line below marks tokens that the loss reads."
    note += f" {more:,} more stretches are not drawn." if more else ""
    return [
        Heading(f"sample {sample.sample_id}", 3),
        Table(("what", "value"), facts),
        Key([(BY_MODALITY[role], ROLES[role]) for role in used]),
        strip,
        Line(note, soft=True),
    ]


def _loss(out: Any) -> list[Part]:
    rows = [(name, f"{float(value):.6g}") for name, value in out.metrics.items()]
    loss = f"{float(out.loss.detach()):.6g}"
    return [Heading(f"{type(out).__name__}: {loss}", 3), Table(("metric", "value"), rows)]
