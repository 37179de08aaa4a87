"""What parity found: findings (one line each) and the report that holds them. Token indices, half-open spans."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mmpack.parity.fixes import FIXES
from mmpack.parity.frames import FrameDifference

if TYPE_CHECKING:
    import numpy as np

    from mmpack.schema.sample import Sample


@dataclass(frozen=True)
class Finding:
    """One difference of one sample.

    `field` is a name of the schema. `index` is the first token that differs, or for lists the first entry; `span` the
    tokens of the rollout's side. `cause` is one of `mmpack.parity.fixes`; `evidence` says what it was told from.
    `frames`: of a video whose frames differ, the first that does.
    """

    sample_id: str
    field: str
    index: int | None
    span: tuple[int, int] | None
    left: str
    right: str
    cause: str
    evidence: str
    fix: str = ""
    frames: FrameDifference | None = None

    def __post_init__(self) -> None:
        if not self.fix:
            object.__setattr__(self, "fix", FIXES[self.cause])

    def __str__(self) -> str:
        place = "" if self.index is None else f" at {self.index}"
        place += "" if self.span is None else f" [{self.span[0]}, {self.span[1]})"
        return one_line(
            f"sample {self.sample_id}: {self.field}{place}: rollout has {self.left}, "
            f"train has {self.right}: {self.cause} ({self.evidence}). Fix: {self.fix}"
        )


@dataclass
class ParityReport:
    """The result of `compare`.

    `ok`: samples were compared, all of `require` in each of them, and all that was compared is equal.
    `compared` counts pairs of samples; `not_compared` maps a field to why; `first` is the first finding
    in sample order, root cause first; `findings` are those kept of `total_findings`; `causes` counts
    samples by cause; `missing` counts the samples that the rollout or the train side lacks. `pairs` holds
    the first samples of each side to draw: those that differ, then those with logprobs on both sides.
    """

    ok: bool
    compared: int
    require: tuple[str, ...]
    not_compared: dict[str, str] = field(default_factory=dict)
    first: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    total_findings: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "train": 0})
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, keys in a fixed order."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pairs"}
        return out | {
            "require": list(self.require),
            "first": self.first and asdict(self.first),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_json(self) -> str:
        """The report as JSON text: equal reports give equal text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self) -> str:
        """One line: the verdict and its numbers."""
        verdict = "parity ok" if self.ok else "parity NOT ok"
        parts = [f"{verdict}: {self.compared} samples compared, {self.total_findings} findings"]
        parts += [f"{n} samples missing in {side}" for side, n in self.missing.items() if n]
        if self.causes:
            parts.append(", ".join(f"{cause} in {n}" for cause, n in self.causes.items()))
        return "; ".join(parts)

    def lines(self, limit: int = 20) -> list[str]:
        """The report as lines of text: the summary, what was not compared, the first `limit` findings."""
        out = [self.summary()]
        out += [one_line(f"not compared: {name}: {why}") for name, why in self.not_compared.items()]
        out += [str(finding) for finding in self.findings[:limit]]
        if self.total_findings > limit:
            out.append(f"and {self.total_findings - limit} findings more")
        return out

    def to_html(
        self,
        media_root: str | os.PathLike[str] | None = None,
        pictures: Mapping[str, np.ndarray] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        train_logprobs: Mapping[str, np.ndarray] | None = None,
    ) -> str:
        """The report as one self-contained page; everything that came from a trace is escaped.

        Args:
            media_root: folder below which the pictures and videos that `Medium.source` names are opened.
            pictures: content_hash -> uint8 [h, w, 3] of pictures that are at hand, [n, h, w, 3] of the sampled
                frames of videos.
            decode: ids -> text, for the tokens around a difference.
            train_logprobs: sample_id -> the trainer's logprobs [n] (natural log), where its trace doesn't hold them.
        """
        from mmpack.parity.html import page

        return page(
            self,
            media_root=media_root,
            known=pictures,
            decode=decode,
            train_logprobs=train_logprobs,
        )

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        from mmpack.parity.html import fragment

        return fragment(self)


def one_line(text: str) -> str:
    """`text` with every control or unprintable character escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
