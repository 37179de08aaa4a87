"""Two records become a report: at each module the error of each row, against what rounding explains there."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.probe.digest import distance, growth
from mmpack.probe.places import BEFORE, Places
from mmpack.probe.record import IN, Entry, Record
from mmpack.probe.report import Contract, First, Kind, ModuleRow, ProbeReport

HINT = 0.5  # of the bound: at a module that parts, the first row above that is named
LEAST_ROWS, MOST_ROWS = 12, 64  # of a mean over rows; more count as so many: rows may be alike


def compare(a: Record, b: Record, contract: Contract) -> ProbeReport:
    """Compare records of the same samples, tokens and directions. Raises: ArgumentError for others."""
    _refuse_others(a, b)
    ours, theirs = _completed(a, b), _completed(b, a)
    rows, first, kinds_parted, lower = [], None, {}, 0
    last: str | None = None
    one_dtype = contract.pooled and a.about.get("dtype") == b.about.get("dtype") is not None
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # error and noise of each entry
    grown: dict[str, tuple[float, float] | None] = {}
    both = [(left, theirs[n]) for n, left in ours.items() if n in theirs]
    shared = [(left, right) for left, right in both if _shape(left) == _shape(right)]
    notes = [
        f"{left.name} has rows of {_shape(left)} in {a.name} and of {_shape(right)} in {b.name}: not compared"
        for left, right in both
        if _shape(left) != _shape(right)
    ]
    broken, alone = _Missed("not finite on both sides"), _Missed("recorded on one side only")
    for index, (left, right) in enumerate(shared):
        error = distance(left.values, right.values)
        noise = _noise(left, right, a.places)
        seen[left.name] = error, noise
        source = seen.get(left.source or "") if left.source == right.source else None
        allowed = bound(left, right, noise, source, contract)
        grown[left.name] = pooled(left, right, contract) if one_dtype else None
        mean = _held(grown[left.name], grown.get(left.source or right.source or ""), contract)
        norms = left.values[:, -2], right.values[:, -2]
        missed = (
            broken.count(left, np.isinf(norms[0]) & np.isinf(norms[1]), a.places),
            alone.count(left, np.isnan(norms[0]) != np.isnan(norms[1]), a.places),
        )
        errors = _Errors(left, right, error, allowed, mean, a.places)
        row = errors.row(index, *missed)
        rows.append(row)
        if row.parts and first is None:
            first = errors.first(index, last)
            kinds_parted = {k: v.parted for k, v in row.kinds.items()}
            lower = _lower(*norms, error > allowed) if left.module == "logprobs" else 0
        last = left.name
    notes += _unplaced(a, b)
    only = ([n for n in ours if n not in theirs], [n for n in theirs if n not in ours])
    if not rows:
        raise ArgumentError(
            f"probe: {a.name!r:.60} and {b.name!r:.60} have no module in common. "
            "Fix: pass sides of one model, with modules under transformers' names"
        )
    suggests = None if first is None else suggestion(first, kinds_parted, lower)
    return ProbeReport(
        a.name,
        b.name,
        a.places,
        rows,
        first,
        suggests,
        contract,
        only,
        a.about,
        b.about,
        [*notes, *broken.lines(), *alone.lines()],
    )


def _unplaced(a: Record, b: Record) -> list[str]:
    """A line for modules that a side has no rows of, because none of their axes could be told to be that of rows."""
    names = sorted((a.unplaced | b.unplaced) - (a.entries.keys() & b.entries.keys()))
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"the rows of {', '.join(names[:3])}{more} can't be told from other axes: not compared"]


@dataclass
class _Missed:
    """Rows that could not be compared: how many, at how many modules, and the first."""

    why: str
    rows: int = 0
    modules: int = 0
    first: str = ""

    def count(self, entry: Entry, chosen: np.ndarray, places: Places) -> int:
        count = int(chosen.sum())
        if count and not self.rows:
            place = places.describe(entry.space, int(np.flatnonzero(chosen)[0]))
            self.first = f"{entry.name}, sample {place['sample']!r}, token {place['token']}"
        self.rows += count
        self.modules += bool(count)
        return count

    def lines(self) -> list[str]:
        if not self.rows:
            return []
        where = f"{self.rows} rows of {self.modules} modules"
        return [f"{where} are {self.why}, first {self.first}: not compared"]


def bound(
    left: Entry,
    right: Entry,
    noise: np.ndarray,
    source: tuple[np.ndarray, np.ndarray] | None,
    contract: Contract,
) -> np.ndarray:
    """float64 [places]: the error that is allowed for each row of an entry.

    Args: `noise` [places]: of both sides. `source`: error and noise of what the module read, row by row.
    """
    allowed = contract.factor * noise + contract.floor
    if source is None or len(source[0]) != len(noise):
        return allowed
    error, before = source
    grows = np.divide(noise, before, out=np.ones_like(noise), where=before > 0)
    own = math.hypot(left.local, right.local)
    with np.errstate(over="ignore"):  # of a record that holds such numbers
        local = contract.factor * (own + contract.gain * grows * error) + contract.floor
    return np.fmin(allowed, local)


def _noise(left: Entry, right: Entry, places: Places) -> np.ndarray:
    """float64 [places]: what rounding moves on both sides; a row has at least the median of its kind."""
    noise = np.hypot(left.noise[:, 0].astype(np.float64), right.noise[:, 0])
    noise = np.where(np.isfinite(noise), noise, 0.0)
    _, kind = places.kinds(left.space)
    seen = ~np.isnan(left.values[:, -2])
    for number in np.unique(kind):
        of_kind = (kind == number) & seen
        if of_kind.any():
            noise[of_kind] = np.maximum(noise[of_kind], np.median(noise[of_kind]))
    return noise


def pooled(left: Entry, right: Entry, contract: Contract) -> tuple[float, float] | None:
    """The mean growth of the rows' norms from left to right, and how much is allowed; None of too few rows."""
    grown = growth(left.values, right.values)
    known = np.isfinite(grown)
    count = int(known.sum())
    if count < LEAST_ROWS:
        return None
    noise = np.hypot(left.noise[known, 1].astype(np.float64), right.noise[known, 1])
    spread = math.sqrt(np.square(np.where(np.isfinite(noise), noise, 0.0)).mean())
    allowed = contract.factor * spread / math.sqrt(min(count, MOST_ROWS)) + contract.pooled_floor
    return float(grown[known].mean()), allowed


def _held(
    mean: tuple[float, float] | None, source: tuple[float, float] | None, contract: Contract
) -> tuple[float, float] | None:
    """The growth of what a module made of rows that are known; what they grew by already is allowed on top.

    Other stages are not held to it: kernels of attention may round exponentials with a sign.
    """
    if mean is None or source is None:
        return None
    return mean[0], mean[1] + contract.gain * abs(source[0])


def _lower(a: np.ndarray, b: np.ndarray, parted: np.ndarray) -> int:
    """How many parted logprobs are lower on one side, by their norms, if all are on the same one; else 0."""
    signs = np.sign(a[parted] - b[parted])
    return len(signs) if len(signs) and abs(signs.sum()) == len(signs) else 0


def _refuse_others(a: Record, b: Record) -> None:
    for name, mine, theirs in (
        ("samples", a.places.sample_ids, b.places.sample_ids),
        ("lengths", a.places.lengths, b.places.lengths),
        ("tokens", a.places.tokens.tolist(), b.places.tokens.tolist()),
        ("media", a.places.media.tolist(), b.places.media.tolist()),
        ("grids of media", a.places.grids.tolist(), b.places.grids.tolist()),
        ("directions", (a.directions, a.seed), (b.directions, b.seed)),
    ):
        if mine != theirs:
            raise ArgumentError(
                f"probe: {a.name!r:.60} and {b.name!r:.60} were recorded with different {name}. "
                "Fix: record both with the same samples, order and options"
            )


def _shape(entry: Entry) -> str:
    """Versions of a framework may hand on other values by one name, as of a rotary embedding all three rows."""
    return f"{entry.space} × {entry.width}"


def _completed(record: Record, other: Record) -> dict[str, Entry]:
    """Its entries, and behind them those that it knows by another's name, but the other side by their own."""
    of: dict[str, list[str]] = {}
    for name, entry in record.aliases.items():
        if name in other.entries and name not in record.entries:
            of.setdefault(entry, []).append(name)
    out: dict[str, Entry] = {}
    for name, found in record.entries.items():
        out[name] = found
        for alias in of.get(name, ()):
            module, _, side = alias.rpartition("<")
            out[alias] = replace(found, module=module, side=side, source=None)
    return out


@dataclass
class _Errors:
    """Of an entry's rows: the error, what is allowed, and their mean growth."""

    left: Entry
    right: Entry
    error: np.ndarray
    allowed: np.ndarray
    mean: tuple[float, float] | None
    places: Places

    def row(self, index: int, broken: int, alone: int) -> ModuleRow:
        entry, known = self.left, ~np.isnan(self.error)
        names, kind = self.places.kinds(entry.space)
        chosen = {name: known & (kind == number) for number, name in enumerate(names)}
        kinds = {name: self.kind(rows) for name, rows in chosen.items() if rows.any()}
        whole = self.kind(known) if known.any() else Kind(0, 0.0, 0.0, 0, 0.0)
        return ModuleRow(
            entry.module, entry.side, index, entry.space, whole, kinds, self.mean, broken, alone
        )

    def kind(self, chosen: np.ndarray) -> Kind:
        error, allowed = self.error[chosen], self.allowed[chosen]
        ratio = error / allowed
        worst = int(np.argmax(ratio))
        return Kind(
            rows=len(error),
            max_error=float(error.max()),
            bound=float(allowed[worst]),
            parted=int((error > allowed).sum()),
            worst=float(ratio[worst]),
        )

    def first(self, index: int, last: str | None) -> First:
        """Where it parts. `last`: the entry before it."""
        left, error, allowed = self.left, self.error, self.allowed
        with np.errstate(invalid="ignore"):
            single = bool((error > allowed).any())
            over = error > HINT * allowed if single else np.isfinite(error)
        place = int(np.flatnonzero(over)[0])
        size, limit = float(error[place]), float(allowed[place])
        if not single and self.mean is not None:
            size, limit = self.mean
        after = left.source if left.side != IN and left.source else last
        return First(
            module=left.module,
            side=left.side,
            index_of_module=index,
            stage=stage_of(left, after),
            after=after,
            error=abs(size),
            bound=limit,
            pooled=not single,
            norms=(float(left.values[place, -2]), float(self.right.values[place, -2])),
            **self.places.describe(left.space, place),
        )


MEDIA = {"image", "video", "audio"}
ONE_SIDED = 8  # logprobs that are lower on one side: by chance in 1 of 128 cases, were each as likely higher
OF_ANGLES = "rotary angles part at plain text too: theta, scaling, or the dtype of positions"
DROPPED_ROWS = (
    "kernel_positions: rotary angles part at media and behind them only, as where mRoPE's height and width rows are "
    "dropped or swapped"
)
OF_WEIGHTS = (
    "this module: a stale or rounded weight, a missing adapter, another epsilon or activation"
)
OF_SUM = "what is added there, and in which order; or a hook or wrapper that changes what a part of this layer puts out"
OF_LOGPROBS = "temperature, target or head: the hidden states agree"
OF_SUPPORT = (
    "truncated_support: the hidden states agree, and one side's logprobs are lower at every token that parts, as where "
    "it takes the softmax over all ids and the other over those that top-k, top-p or min-p left (kept_ids); else a "
    "lower temperature, where the targets are unlikely ids"
)
OF_ATTENTION = (
    "attention: mask, scale, heads, rotary embedding; state_leak if only samples behind others part"
)
ONLY_MEDIA = (
    "image_mask: attention parts at media only, as where image tokens should see each other and don't; or "
    "kernel_positions, in a fused kernel"
)
BEHIND_MEDIA = (
    "kernel_positions: attention parts at media and behind them only, as in a fused kernel"
)
OF_PIXELS = (
    "pixels: resizing, normalisation, or the order of media (mmpack parity names the setting)"
)
OF_MERGE = "features of media: another picture's, stale ones, or a wrong order"
# of what goes into a module: what computed it is no module itself
INPUTS = (
    (r"rotary", "the position ids"),
    (r"patch_embed", "the pixels"),
    (r"(self_attn\.o_proj|attn\.proj|attention\.projection_layer)$", "rotary embedding or attention"),
    (r"(down_proj|linear_fc2|mlp\.fc2)$", "the activation of the MLP, its gate times up"),
    (r"layers\.0\.[^.]*norm[^.]*$", "the merge of media features into token embeddings"),
    (r"(blocks|layer)\.0\.[^.]*norm[^.]*$", "what precedes the tower's blocks: window order, position embedding"),
    (r"(q_norm|k_norm)$", "the split of heads"),
    (r"(merger|deepstack_merger_list\.\d+|projector)\.", "the merge of patches"),
    (r"norm", "the residual sum, or features added to it (deepstack)"),
    (r"lm_head$", "the choice of rows that predict"),
)  # fmt: skip
OUTPUTS = (
    (r"embed_tokens$", "token embedding"),
    (r"rotary", "rotary angles"),
    (r"logprobs$", "selected logprob: head, temperature, target"),
    (r"lm_head$", "LM head"),
    (r"(layers|blocks|layer)\.\d+$", "residual sum"),
)


def stage_of(entry: Entry, after: str | None) -> str:
    """Which stage an entry shows."""
    table = INPUTS if entry.side == IN else OUTPUTS
    found = next((words for pattern, words in table if re.search(pattern, entry.module)), None)
    if entry.side == IN:
        between = f"between {after} and {entry.name}" if after else f"before {entry.name}"
        return f"{between}: {found}" if found else between
    if found == "residual sum":
        return (
            f"between {after} and the end of {entry.module}: the residual sum" if after else found
        )
    return found or "the module itself: its weights, its settings or its arithmetic"


def suggestion(first: First, parted: dict[str, int], lower: int = 0) -> str:
    """What is worth a look, by where and in which rows the sides part first.

    Args: `parted`: rows by modality. `lower`: of `logprobs`, how many parted rows are lower on one and the same side;
    0 unless all are.
    """
    kinds = {name for name, count in parted.items() if count}
    media, plain = kinds & MEDIA, BEFORE in kinds
    if "rotary" in first.module:
        return _of_rotary(first.side, plain)
    if first.side != IN and "residual sum" in first.stage:
        return OF_SUM
    if first.side != IN:
        if first.module != "logprobs":
            return OF_WEIGHTS
        return OF_SUPPORT if lower >= ONE_SIDED else OF_LOGPROBS
    if "attention" in first.stage:
        if first.medium is not None or plain:
            return OF_ATTENTION
        return ONLY_MEDIA if kinds == media else BEHIND_MEDIA
    if "pixels" in first.stage:
        return OF_PIXELS
    return OF_MERGE if "merge of media" in first.stage else "what runs between these two modules"


def _of_rotary(side: str, plain: bool) -> str:
    if side == IN:
        return "position ids differ: compare the layouts first (mmpack parity)"
    return OF_ANGLES if plain else DROPPED_ROWS
