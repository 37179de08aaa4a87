"""Drift of logprobs between two engines over the same sampled tokens [n], and what it comes from, where evidence says.

Numbers are compared after layouts: parity first. d = train − rollout, natural logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, check_name, check_number, check_whole, kind_of
from mmpack.parity.drift_axes import DriftAxis, EffectiveSize, split
from mmpack.parity.drift_replay import ComparedKept, ComparedRoutes, kept_of, per_sample, routes_of
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.relation import excluded, fits_temperatures, relation
from mmpack.parity.report import counted, wrapped
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample, as_samples

DRIFT_FIXES = {
    "dtype": "Run both sides in one dtype, or correct for the difference by importance sampling.",
    "stale_weights": "Send every tensor after each step, and compare checksums on both sides.",
    "routing": "Hand the engine's routed_experts on and replay them in the trainer's forward, of every token.",
    "truncated_support": "Hand the engine's kept_ids on and score over them (support=), or sample without filters.",
    "logprob_shift": "Take each token's logprob from the row before it: one side reads the next row, or its own.",
    "logprob_base": "Hand natural logs on: multiply logs of base 2 by ln 2, and of base 10 by ln 10.",
    "temperature": "Divide the trainer's logits by the rollout's temperature, or record raw logprobs on both sides.",
    UNKNOWN: "Compare layouts first; then record dtype, policy versions and checksums on both sides.",
}
KINDS = ("raw", "processed")
_SHOWN = 4  # tensors named in one line


@dataclass(frozen=True)
class LogprobDrift:
    """Figures over all `tokens`. `k3` is the mean of exp(d) − 1 − d, an estimate of KL(rollout ‖ train) (Schulman).

    `argmax_differs`: share of tokens whose likeliest id differs; None if it was not recorded. `ok`: inside the bound of
    two engines in fp32 (`contracts.TOLERANCES`). `causes`: cause to evidence; of drift without any, `unknown`.

    `axes`: the same figures by `modality` (of the sample), `medium` (the last one before the token), `position` and
    `response` (position in the sample and in the response), `length` of the sample, `turn` and policy `version`.
    `weights`: effective sample sizes of importance weights, by token and by sample. `suggests`: what the axes point to,
    the strongest first. Tokens whose logprob is not finite (`not_finite`) are in none of these.
    """

    tokens: int
    max_abs: float
    mean_abs: float
    k3: float
    argmax_differs: float | None
    ok: bool
    causes: dict[str, str] = field(default_factory=dict)
    not_finite: int = 0
    axes: dict[str, DriftAxis] = field(default_factory=dict)
    weights: tuple[EffectiveSize, ...] = ()
    suggests: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values, keys in a fixed order."""
        return asdict(self)

    @property
    def sentences(self) -> list[str]:
        """Figures, causes with their fixes, suggestions and weights, one string each."""
        out = [f"logprobs: {self.figures}"]
        if self.not_finite:
            tokens = counted(self.not_finite, "token")
            out.append(f"{tokens} without a finite logprob on both sides, in none of the groups")
        out += [f"{name}: {why}; fix: {DRIFT_FIXES[name]}" for name, why in self.causes.items()]
        out += [
            f"drift {line}" if line.startswith(("grows", "falls")) else f"drift is {line}"
            for line in self.suggests
        ]
        return out + [size.suggests for size in self.weights]

    def lines(self) -> list[str]:
        """The sentences in lines of at most 120 characters."""
        first, *others = self.sentences
        rest = (wrapped(f"  {text}", "    ") for text in others)
        return [*wrapped(first), *(line for lines in rest for line in lines)]

    @property
    def figures(self) -> str:
        """Tokens and figures in one line."""
        share = "" if self.argmax_differs is None else f", argmax differs {self.argmax_differs:.2%}"
        figures = f"max {self.max_abs:.1e}, mean {self.mean_abs:.1e}, k3 {self.k3:.1e}{share}"
        return f"{counted(self.tokens, 'token')}: {figures}"

    def __str__(self) -> str:
        named = [f"{name} ({why}). Fix: {DRIFT_FIXES[name]}" for name, why in self.causes.items()]
        return "; ".join([self.figures, *named])


def logprob_drift(
    samples: Sequence[Sample],
    logprobs: Sequence[np.ndarray],
    *,
    kind: str = "raw",
    argmax_ids: Sequence[np.ndarray] | None = None,
    dtype: str | None = None,
    version: str | None = None,
    temperature: float | None = None,
    checksums: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
    routed_experts: Sequence[np.ndarray | None] | ComparedRoutes | None = None,
    kept_ids: Sequence[Ragged | None] | ComparedKept | None = None,
    near: int = 64,
) -> LogprobDrift:
    """Compare `rollout_logprobs` of samples with a trainer's, token by token.

    Beside what is recorded, the numbers themselves show logprobs of the next token or the one before
    (`logprob_shift`), of base 2 or 10 (`logprob_base`) and of another temperature: see `parity.relation`.

    Args:
        samples: of the rollout; `metadata["engine"]["dtype"]`, `metadata["argmax_ids"]` and `policy_versions` are
            evidence where they are recorded.
        logprobs: float [n] per sample, of its loss tokens.
        kind: what `logprobs` are, `raw` or `processed`.
        argmax_ids: int [n] per sample, the trainer's likeliest ids.
        dtype, version: the trainer's compute dtype and weights version.
        temperature: by which the trainer divides its logits, where it does.
        checksums: of the trainer's and of the engine's tensors, by name.
        routed_experts: the experts that the trainer took (`record_routes`), integers [L, layers, k] per sample, or None
            for one without; or what was compared already. Where `routed_experts` of a sample differ from them, or only
            one side has some and there is drift, the cause is `routing`.
        kept_ids: what the trainer's logprobs are over, `kept_ids` per sample, or None for one over all ids; or what was
            compared already. Where lists differ, or only one side has some and there is drift, the cause is
            `truncated_support`. Not given, it is so only where the trainer's logprobs are the lower ones on average.
        near: how many tokens after a medium count as close to it.

    Raises: ArgumentError for logprobs of unlike kinds, missing ones, other counts, or no token at all.
    """
    samples = as_samples(samples, "logprob_drift")
    _check_evidence(kind, dtype, version, temperature, checksums)
    rolled = [_recorded(s, kind) for s in samples]
    theirs = [
        logprob_column(x, i) for i, x in enumerate(per_sample("logprobs", logprobs, len(rolled)))
    ]
    if [len(a) for a in rolled] != [len(b) for b in theirs] or not sum(map(len, rolled)):
        raise ArgumentError(
            f"logprob_drift: the rollout has {sum(map(len, rolled))} logprobs, the trainer "
            f"{sum(map(len, theirs))}. Fix: pass one per loss token of each sample, and at least one"
        )
    for sample, column in zip(samples, rolled, strict=True):
        cut = any(not 0 <= x.start <= x.stop <= len(sample) for x in sample.loss_spans)
        if cut or len(column) != sample.num_loss_tokens:
            raise ArgumentError(
                f"logprob_drift: {sample.sample_id!r:.60} has {len(sample)} tokens, {sample.num_loss_tokens} in its "
                f"loss_spans and {len(column)} rollout_logprobs. Fix: pass one per loss token; mp.validate says more"
            )
    check_whole("logprob_drift", "near", near)
    rollout = np.concatenate(rolled)
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # infinities: their differences are NaN, and counted
        d = np.concatenate(theirs) - rollout
        k3 = float((np.expm1(d) - d).mean())
    figures = {
        "max_abs": float(np.abs(d).max()),
        "mean_abs": float(np.abs(d).mean()),
        "k3": k3,
    }
    fine = all(  # NaN is not <=
        value <= TOLERANCES[f"engines_{name.removesuffix('_abs')}"].value
        for name, value in figures.items()
    )
    causes = _evidence(samples, dtype, version, checksums)
    if why := routes_of(samples, routed_experts).evidence(drifts=not fine):
        causes["routing"] = why
    kept = kept_of(samples, kept_ids)
    falls = float(d[np.isfinite(d)].sum()) < 0
    if why := kept.evidence(not fine, falls):
        causes["truncated_support"] = why
    if not fine:
        causes |= _from_numbers(samples, rolled, theirs, temperature)
    if not fine and not causes:
        out = {UNKNOWN} | excluded(rolled, theirs)
        out |= {"truncated_support"} if kept.rules_out else set()
        causes = {
            UNKNOWN: "no evidence; possible: " + ", ".join(c for c in DRIFT_FIXES if c not in out)
        }
    share = None
    if argmax_ids is not None:
        share = _argmax_differs(samples, per_sample("argmax_ids", argmax_ids, len(samples)))
    parts = split(samples, rollout, d, near, version, same=set(causes) == {UNKNOWN})
    return LogprobDrift(
        tokens=len(d),
        **figures,
        argmax_differs=share,
        ok=fine,
        causes=causes,
        not_finite=parts.not_finite,
        axes=parts.axes,
        weights=parts.weights,
        suggests=parts.suggests,
    )


def _check_evidence(kind: Any, dtype: Any, version: Any, temperature: Any, checksums: Any) -> None:
    """Refuse evidence of another type than a trace records: it would never be equal."""
    check_name("logprob_drift", "kind", kind, KINDS)
    for name, value in (("dtype", dtype), ("version", version)):
        if value is not None and not isinstance(value, str):
            raise ArgumentError(
                f"logprob_drift: {name} is {kind_of(value)}, expected a str. Fix: pass it as the trace names it"
            )
    if temperature is not None:
        check_number("logprob_drift", "temperature", temperature, least=0)
    pair = isinstance(checksums, Sequence) and len(checksums) == 2
    if checksums is not None and not (pair and all(isinstance(c, Mapping) for c in checksums)):
        raise ArgumentError(
            "logprob_drift: checksums is not a pair of dicts. "
            "Fix: pass a pair of {name: checksum}, the trainer's and the engine's"
        )


def logprob_column(values: Any, i: int | str) -> np.ndarray:
    """float64 [n]. Raises: ArgumentError."""
    try:
        column = np.asarray(values, np.float64)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # the last one: a tensor with a gradient
        why = " ".join(str(error).split())[:120]
        raise ArgumentError(
            f"logprob_drift: logprobs[{i!r:.60}] are not numbers ({why}). Fix: pass float [n], of the loss tokens"
        ) from None
    if column.ndim != 1:
        raise ArgumentError(
            f"logprob_drift: logprobs[{i!r:.60}] have shape {list(column.shape)}, expected [n]. "
            "Fix: pass one value per loss token"
        )
    return column


def _recorded(sample: Sample, kind: str) -> np.ndarray:
    if sample.rollout_logprobs is None:
        raise ArgumentError(
            f"logprob_drift: {sample.sample_id!r:.60} has no rollout_logprobs. Fix: let the engine return them"
        )
    mine = (sample.sampling or {}).get("logprobs")
    if mine is not None and mine != kind:
        raise ArgumentError(
            f"logprob_drift: {sample.sample_id!r:.60} has {mine} logprobs, but the trainer's are {kind}. "
            "Fix: compare raw with raw, or processed with processed under the same sampling"
        )
    return sample.rollout_logprobs.astype(np.float64)


def _from_numbers(
    samples: Sequence[Sample],
    rolled: list[np.ndarray],
    theirs: list[np.ndarray],
    temperature: float | None,
) -> dict[str, str]:
    found = relation(rolled, theirs)
    if found is not None and found[0] != "temperature":
        return dict([found])
    ratio = _temperature_ratio(samples, temperature)
    if ratio not in (None, 1) and fits_temperatures(rolled, theirs, ratio):
        ratios = f"the rollout's temperature is {ratio:.3g} times the trainer's {temperature:g}"
        return {"temperature": f"{ratios}, and every token fits that"}
    return {} if found is None else dict([found])


def _temperature_ratio(samples: Sequence[Sample], temperature: float | None) -> float | None:
    """The rollout's temperature over the trainer's; None if they were not recorded, or several were used."""
    used = [(s.sampling or {}).get("temperature") for s in samples]
    if not temperature or not isinstance(used[0], int | float) or used != used[:1] * len(used):
        return None
    return used[0] / temperature or None


def _evidence(
    samples: Sequence[Sample],
    dtype: str | None,
    version: str | None,
    checksums: tuple[Mapping[str, str], Mapping[str, str]] | None,
) -> dict[str, str]:
    out = {}
    engines = [s.metadata.get("engine") for s in samples]
    used = {e["dtype"] for e in engines if isinstance(e, dict) and type(e.get("dtype")) is str}
    if dtype is not None and used - {dtype}:
        out["dtype"] = f"the engine computes in {', '.join(sorted(used))}, the trainer in {dtype}"
    stale = []
    if checksums is not None:
        trainer, engine = checksums
        names_of_both = dict.fromkeys([*trainer, *engine])
        unlike = [n for n in names_of_both if trainer.get(n) != engine.get(n)]
        if unlike:
            more = f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
            names = ", ".join(unlike[:_SHOWN])
            stale.append(f"{len(unlike)} of {len(names_of_both)} tensors differ: {names}{more}")
    versions = {v.version for s in samples for v in s.policy_versions or ()}
    if version is not None and versions - {version}:
        stale.append(
            f"tokens by weights {', '.join(sorted(versions))}, the trainer is at {version}"
        )
    if stale:
        out["stale_weights"] = "; ".join(stale)
    return out


def _argmax_differs(samples: Sequence[Sample], argmax_ids: Sequence[np.ndarray]) -> float | None:
    differs = total = 0
    for sample, ids in zip(samples, argmax_ids, strict=True):
        mine = sample.metadata.get("argmax_ids")
        if not isinstance(mine, list) or len(mine) != len(ids) or None in mine:
            return None
        differs += int((np.asarray(mine) != np.asarray(ids)).sum())
        total += len(mine)
    return differs / total
