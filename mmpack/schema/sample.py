"""One sample of a trace: token ids [L], their media, spans that say what each token is, columns.

Ids are expanded (one per vision token) and never padded; spans are half-open token indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError
from mmpack.families import FAMILIES
from mmpack.notebook import Drawn
from mmpack.schema.codec import CodecIds
from mmpack.schema.error_text import safe_repr, shown, trace_error
from mmpack.schema.fields import Record, Records, column, keep_unknown
from mmpack.schema.media import Medium
from mmpack.schema.plain_json import check_json
from mmpack.schema.ragged import Ragged, RaggedSpec, TeachersSpec
from mmpack.schema.routes import RoutesSpec
from mmpack.schema.spans import (
    ActionSpan,
    BboxTarget,
    Cost,
    LossSpan,
    ModalitySpan,
    ObservationSpan,
    PointTarget,
    PolicyVersion,
    RegionSpan,
    Score,
)
from mmpack.schema.specs import Array, Int, Ints, Json, Str

SCHEMA_VERSION = "2"
VERSIONS = ("1", "2")  # that are read and written
# what the engine did, to be replayed: fields that version 1 does not have
REPLAY = ("kept_ids", "teachers", "routed_experts")
# in `metadata`: sha256:<64 hex> of the decoded loss tokens (special tokens kept), all loss spans at once, and
# /<16 hex> of their ids (`layout.fingerprint.response_hash`)
RESPONSE_TEXT_KEY = "response_text_sha256"
COORDINATE_SYSTEMS = ("absolute_pixels", "normalized_1", "normalized_1000")
FINISH_REASONS = ("stop", "length", "tool", "abort")


class Version(Str):
    """A version of the schema that this mmpack reads."""

    def read(self, value: Any, where: str) -> str:
        if not (isinstance(value, str) and value in self.choices):
            known = " or ".join(map(repr, self.choices))
            raise trace_error(
                where, f"{shown(value)} is unknown, this mmpack reads {known}", "MM005"
            )
        return value


@dataclass(eq=False)
class Sample(Record, Drawn):
    """One sample of a trace: what a rollout engine returned and a trainer must see.

    Arrays are numpy: `input_ids` int64 [L], `position_ids` int64 [rows, L], `attention_mask`
    int8 [L], `rollout_logprobs` float32 [n], `routed_experts` uint8 or uint16 [L, layers, k]. `kept_ids` and each of
    `teachers` hold a list per loss token. An optional field is None where the producer recorded nothing.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> ids = np.array([9, 8, 7, 6])
        >>> sample = mp.Sample("a", "prompt-1", "qwen2_5_vl", ids, [], [], [mp.LossSpan(2, 4)])
        >>> sample
        Sample('a', group_id='prompt-1', family='qwen2_5_vl', tokens=4, media=0, loss_tokens=2)
        >>> sample.to_dict()["loss_spans"]
        [{'start': 2, 'stop': 4, 'kind': 'response'}]
        >>> mp.Sample.from_dict(sample.to_dict()) == sample
        True
    """

    sample_id: str = column(Str(), "unique in a trace")
    group_id: str = column(Str(), "the prompt's id")
    family: str = column(Str(FAMILIES.keys(), code="MM006"), "model family")
    input_ids: np.ndarray = column(
        Array("int64"), "expanded ids, one per vision token, never padded"
    )
    media: list[Medium] = column(Records(Medium), "in order of first appearance")
    modality_spans: list[ModalitySpan] = column(
        Records(ModalitySpan), "placeholders, sorted, disjoint; all else is text"
    )
    loss_spans: list[LossSpan] = column(Records(LossSpan), "tokens of the loss, sorted, disjoint")
    schema_version: str = column(Version(VERSIONS), "version of this schema", SCHEMA_VERSION)
    position_ids: np.ndarray | None = column(
        Array("int64", rows=0, low=None), "as the producer used them; rows t, h, w", None
    )
    attention_mask: np.ndarray | None = column(
        Array("int8", low=0, high=1),
        "1 where a token is attended; may be of the padded length",
        None,
    )
    processor: dict[str, Any] | None = column(
        Json(), "every resolved setting that decides the layout", None
    )
    processor_fingerprint: str | None = column(
        Str(pattern="^sha256:[0-9a-f]{64}$"), "sha256 of `processor` as canonical JSON", None
    )
    observation_spans: list[ObservationSpan] | None = column(
        Records(ObservationSpan), "context that no policy wrote", None
    )
    action_spans: list[ActionSpan] | None = column(Records(ActionSpan), "decoded actions", None)
    region_spans: list[RegionSpan] | None = column(
        Records(RegionSpan), "tokens about a place", None
    )
    bbox_targets: list[BboxTarget] | None = column(Records(BboxTarget), "reference boxes", None)
    point_targets: list[PointTarget] | None = column(Records(PointTarget), "reference points", None)
    coordinate_system: str | None = column(Str(COORDINATE_SYSTEMS), "of boxes and points", None)
    screen_size: tuple[int, int] | None = column(Ints(2), "width, height in pixels", None)
    rewards: list[Score] | None = column(Records(Score), "what the policy is paid", None)
    costs: list[Cost] | None = column(Records(Cost), "what it is charged", None)
    verifiers: list[Score] | None = column(Records(Score), "verdicts that are not paid", None)
    rollout_logprobs: np.ndarray | None = column(
        Array("float32", low=None), "natural log, of the loss tokens, spans concatenated", None
    )
    sampling: dict[str, Any] | None = column(
        Json(), "temperature, top_p, …, and what `rollout_logprobs` mean: processed or raw", None
    )
    finish_reason: str | None = column(Str(FINISH_REASONS), "why generation ended", None)
    policy_versions: list[PolicyVersion] | None = column(
        Records(PolicyVersion), "which weights produced which tokens", None
    )
    trajectory_id: str | None = column(Str(), "ties the per-turn samples of an episode", None)
    turn: int | None = column(Int(), "turn of this sample in its trajectory", None)
    prefix_cached_tokens: int | None = column(
        Int(), "leading tokens that the engine took from its cache", None
    )
    codec_ids: list[CodecIds] | None = column(
        Records(CodecIds), "audio as ids of its codec: compared by parity, never packed", None
    )
    kept_ids: Ragged | None = column(
        RaggedSpec(), "per loss token, the ids that top-k, top-p and min-p left", None
    )
    teachers: dict[str, Ragged] | None = column(
        TeachersSpec(), "per teacher and loss token, its top ids and their logprobs", None
    )
    routed_experts: np.ndarray | None = column(
        RoutesSpec(), "experts that the engine took, per token and layer [L, layers, k]", None
    )
    metadata: dict[str, Any] = column(
        Json(), "anything else, carried through untouched", factory=dict
    )

    @classmethod
    def from_dict(cls, value: Any, where: str | None = None) -> Sample:
        """Build a sample from parsed JSON (arrays may be numpy); padding is cut off, unknown fields go to `metadata`.

        `where` begins the message of an error. Raises TraceError.
        """
        where = cls.__name__ if where is None else where
        if isinstance(value, dict):  # the version first: another one may have other fields
            version = value.get("schema_version")
            if version is None:
                raise trace_error(f"{where}.schema_version", "is missing", "MM004")
            version = cls.columns()["schema_version"].spec.read(version, f"{where}.schema_version")
            if version == "1" and any(value.get(name) is not None for name in REPLAY):
                value = _of_version_1(value, where)
        sample: Sample = super().from_dict(value, where)
        for fault in shape_faults(sample, f"{where}."):
            raise fault
        return unpadded(sample)

    def to_dict(self, numpy: bool = False) -> dict[str, Any]:
        """As `Record.to_dict`. Raises: TraceError (MM012) for a sample of version 1 with a field of version 2."""
        for fault in version_faults(self, "Sample."):
            raise fault
        return super().to_dict(numpy)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        return (
            f"Sample({safe_repr(lambda: repr(self.sample_id))}, group_id={safe_repr(lambda: repr(self.group_id))}, "
            f"family={safe_repr(lambda: repr(self.family))}, tokens={safe_repr(lambda: str(len(self)))}, "
            f"media={safe_repr(lambda: str(len(self.media)))}, "
            f"loss_tokens={safe_repr(lambda: str(self.num_loss_tokens))})"
        )

    @property
    def media_ids(self) -> list[str]:
        return [m.media_id for m in self.media]

    @property
    def media_cache_keys(self) -> list[str]:
        return [m.cache_key for m in self.media]

    @property
    def vision_token_offsets(self) -> np.ndarray:
        """int64 [M+1]: where each medium's rows start in the concatenated vision embeddings."""
        return np.cumsum([0] + [m.num_tokens for m in self.media], dtype=np.int64)

    @property
    def num_loss_tokens(self) -> int:
        return sum(s.stop - s.start for s in self.loss_spans)

    @property
    def num_patches(self) -> int:
        """Patches before merging that the vision tower reads for this sample, each medium once."""
        return sum({m.cache_key: m.num_patches for m in self.media}.values())

    @property
    def loss_indices(self) -> np.ndarray:
        """int64 [n]: token index of each loss token, spans concatenated (and cut at L)."""
        length = len(self)
        return concatenated_ranges([(s.start, min(s.stop, length)) for s in self.loss_spans])


def vocabulary_size(processor: dict[str, Any] | None) -> int | None:
    """How many ids the tokenizer of these settings has, special ones included; None where they don't say."""
    tokenizer = (processor or {}).get("tokenizer")
    size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    return size if type(size) is int and size > 0 else None


def version_faults(sample: Sample, prefix: str = "") -> Iterator[TraceError]:
    """Fields of version 2 in a sample of version 1 (MM012), where they would be read as unknown ones."""
    if sample.schema_version == "1":
        for name in REPLAY:
            if getattr(sample, name) is not None:
                yield trace_error(f"{prefix}{name}", "is a field of version 2", "MM012")


def shape_faults(sample: Sample, prefix: str = "") -> Iterator[TraceError]:
    """Arrays that don't have the length of `input_ids`, or one row for each of the family's positions (MM008);
    audio of a family without audio (MM011).
    """
    yield from version_faults(sample, prefix)
    known = FAMILIES[sample.family].placeholder_ids
    for name in ("media", "modality_spans"):
        for i, item in enumerate(getattr(sample, name)):
            if item.modality not in known and item.modality == "audio":
                why = f"is audio, which {sample.family} does not hear"
                yield trace_error(f"{prefix}{name}[{i}].modality", why, "MM011")
    length = len(sample)
    routes = sample.routed_experts
    if routes is not None and len(routes) != length:
        why = f"has the routes of {len(routes)} tokens, there are {length}"
        yield trace_error(f"{prefix}routed_experts", why, "MM008")
    shapes = {
        "position_ids": (FAMILIES[sample.family].position_rows, length),
        "attention_mask": (length,),
    }
    for name, shape in shapes.items():
        array = getattr(sample, name)
        if array is not None and array.shape != shape:
            why = f"has shape {list(array.shape)}, expected {list(shape)}"
            yield trace_error(f"{prefix}{name}", why, "MM008")


def as_samples(given: Any, what: str) -> list[Sample]:
    """The samples of a list, a data set or a generator. Raises: ArgumentError for what is none."""
    if isinstance(given, Sample) or not hasattr(given, "__iter__"):
        raise ArgumentError(
            f"{what}: samples is {type(given).__name__}, expected a list of Samples. Fix: pass [sample]"
        )
    samples = list(given)
    for i, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise ArgumentError(
                f"{what}: samples[{i}] is {type(sample).__name__}, expected Sample. "
                "Fix: pass what a processor or read_trace returns; for a dict, call mp.Sample.from_dict"
            )
    return samples


def concatenated_ranges(spans: list[tuple[int, int]]) -> np.ndarray:
    """int64: the indices of all spans, one after the other."""
    if not spans:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in spans])


def _of_version_1(value: dict[str, Any], where: str) -> dict[str, Any]:
    """The record without the fields that version 1 does not have: unknown there, they are kept in `metadata`."""
    unknown = {name: value[name] for name in REPLAY if value.get(name) is not None}
    for name, item in unknown.items():
        check_json(item, f"{where}.{name}")
    known = {name: item for name, item in value.items() if name not in unknown}
    metadata = known.get("metadata")
    if isinstance(metadata, dict | None):  # else the spec refuses it
        known["metadata"] = keep_unknown(metadata or {}, unknown)
    return known


def unpadded(sample: Sample) -> Sample:
    """The sample without the padding that `attention_mask` shows: ids at an end, all the family's pad id, or several
    of another one.

    A copy, if there is some. Other ids that are masked stay, as holes within do: a rule names them.
    """
    mask, ids = sample.attention_mask, sample.input_ids
    if mask is None:
        return sample
    kept = np.flatnonzero(mask)
    start, stop = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
    pad = FAMILIES[sample.family].pad_token_id
    start = start if _is_padding(ids[:start], pad) else 0
    stop = stop if _is_padding(ids[stop:], pad) else len(mask)
    if (start, stop) == (0, len(mask)):
        return sample
    cut = slice(start, stop)
    positions, routes = sample.position_ids, sample.routed_experts
    return replace(
        sample,
        input_ids=ids[cut].copy(),
        attention_mask=mask[cut].copy(),
        position_ids=None if positions is None else np.ascontiguousarray(positions[:, cut]),
        routed_experts=None if routes is None else routes[cut].copy(),
        metadata=keep_unknown(sample.metadata, {"padding": [start, len(mask) - stop]}),
    )


def _is_padding(ids: np.ndarray, pad: int) -> bool:
    return bool((ids == ids[:1]).all()) and (len(ids) != 1 or int(ids[0]) == pad)
