"""PackedBatch: what the trainer gets. T rows, B samples, N loss tokens, M distinct media, O placeholder runs.

Rows of all samples lie one after the other; rows that samples share may lie there once (see layout/forest.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from mmpack.errors import ArgumentError, BackendError, kind_of
from mmpack.families import Family, get_family
from mmpack.notebook import Drawn
from mmpack.ops.attention import AttentionPlan
from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.linear_attention import SegmentPlan
from mmpack.ops.linear_attention.segment_plan import Wave
from mmpack.ops.logprobs.support import ScoredSupport, Support
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.calls import Counts
from mmpack.packing.media import patch_offsets
from mmpack.packing.places import LossPlaces
from mmpack.packing.tensors import to_int32
from mmpack.schema.error_text import safe_repr
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.spans import Cost, LossSpan, ModalitySpan, Score
from mmpack.schema.turns import span_turns

OfLoss = TypeVar("OfLoss", torch.Tensor, Support, ScoredSupport)  # [N, …], or N lists


@dataclass(kw_only=True)
class LossIndex:
    """Which rows are read for the loss, and what each is scored on."""

    loss_rows: torch.Tensor  # [N] int32, the row that predicts the loss token
    loss_targets: torch.Tensor  # [N] int64
    cu_loss: torch.Tensor  # [B+1] int32, in the caller's order of samples
    loss_rows_unique: torch.Tensor  # [R] int32
    loss_row_inverse: torch.Tensor  # [N] int32 into loss_rows_unique
    loss_turn: torch.Tensor  # [N] int32 by span_turns; -1 where neither span nor sample has a turn
    loss_token_index: torch.Tensor  # [N] int32, token of the sample
    region_rows: torch.Tensor  # [regions, 3] int32: sample, start, stop on the loss axis
    loss_places: LossPlaces  # the last three and cu_loss on the host, where scores are placed


@dataclass(kw_only=True, repr=False)
class Batch(LossIndex, Drawn):
    """What packed and padded batches have in common."""

    instead_of_a_tensor: ClassVar[str] = "pass a column of the batch, such as batch.cu_loss"

    family: str
    input_ids: torch.Tensor  # int64, [T] or [B, S]
    position_ids: torch.Tensor  # int64, [4, T] or [4, B, S]; one row for families without mRoPE
    sample_ids: list[str]
    group_index: torch.Tensor  # [B] int64, numbered in order of first appearance
    rewards: list[list[Score]]  # of each sample
    costs: list[list[Cost]]
    verifiers: list[list[Score]]
    media: list[Medium]  # [M]
    vision_token_offsets: torch.Tensor  # [M+1] int64
    patch_offsets: torch.Tensor  # [M+1] int64 into pixel_values
    pixel_values: torch.Tensor | None  # [patches, patch_dim], each medium once; see `float_pixels`
    audio_features: torch.Tensor | None  # [frames, mel_bins], each audio once
    # modality -> float32 [3, 256]: what bytes of `pixel_values` stand for; {} where those are floats
    byte_values: dict[str, torch.Tensor]
    media_occurrence: torch.Tensor  # [O] int32: the medium of each placeholder run
    media_order: list[int]  # the same on the host, where the forward is planned
    loss_columns: dict[str, torch.Tensor]  # [N] each
    token_columns: dict[str, torch.Tensor]  # [T, …] each
    # what the engine did, where its samples say so: see packing/replay.py
    kept_ids: Support | None = None  # N lists: `support=` of the logprobs
    teachers: dict[str, ScoredSupport] = field(default_factory=dict)  # N lists each
    # [T, layers, k] (padded: [B·S, layers, k]) uint8, or int32 from 257 experts on
    routed_experts: torch.Tensor | None = None
    # [sum of L] int64: the row of each sample's tokens, samples concatenated
    token_rows: torch.Tensor
    token_counts: list[int]  # [B]
    loss_counts: list[int]  # [B]
    dropped: list[Problem]  # why samples were left out, with on_invalid="drop"
    stats: dict[str, int] = field(default_factory=dict)
    # int32, [T] or [B, S]: row q sees row k if k <= q < visible_until[k]
    visible_until: torch.Tensor
    # int32, as visible_until, of families with two-way media: then row q sees row k if
    # visible_from[k] <= q < visible_until[k]
    visible_from: torch.Tensor | None = None
    # of `visible_until` for attention kernels; of other rules: `plan_of_rule`
    attention_plan: AttentionPlan
    # the same for linear attention, of families that have it
    segment_plan: SegmentPlan | None = None
    id_range: tuple[int, int] | None = None  # smallest and largest id, on the host
    last_expert: int | None = None  # the largest id in `routed_experts`, on the host

    def __post_init__(self) -> None:
        # a batch that was moved has them already
        if self.id_range is None:
            low, high = self.input_ids.aminmax()
            self.id_range = int(low), int(high)
            self.attention_plan.cover(**self._rows())
        if self.last_expert is None and self.routed_experts is not None:
            self.last_expert = int(self.routed_experts.max())

    @property
    def media_ids(self) -> list[str]:
        return [m.media_id for m in self.media]

    @property
    def media_cache_keys(self) -> list[str]:
        return [m.cache_key for m in self.media]

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_counts)

    @property
    def device(self) -> torch.device:
        return self.loss_rows.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        """The batch with every tensor on `device`; the layout that hosts need stays where it is.

        Raises ArgumentError, before the move, as `check_unchanged` does, and for what is not a device.
        """
        if not isinstance(device, torch.device | str | int):
            raise ArgumentError(
                f"to: device is {kind_of(device)}, expected a device. Fix: pass 'cuda'; a batch keeps its dtypes"
            )
        return self._with_tensors("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> Any:
        """The batch in page-locked memory, from where `to(device, non_blocking=True)` copies without waiting.

        A DataLoader with `pin_memory=True` calls it. Pixels of single media are views of the pinned ones.
        Raises BackendError without an accelerator.
        """
        refuse_no_accelerator()
        batch = self._with_tensors("pin_memory")
        for audio, rows in ((False, batch.pixel_values), (True, batch.audio_features)):
            ends = patch_offsets(batch.media, audio)
            batch.media = [
                dataclasses.replace(medium, pixel_values=rows[a:b])
                if rows is not None and (medium.modality == "audio") == audio
                else medium
                for medium, a, b in zip(batch.media, ends, ends[1:], strict=False)
            ]
        return batch

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that `stream` uses the batch: no tensor's memory is given away before it is done.

        As `Tensor.record_stream`, for batches that were copied on another stream.
        """
        for f in dataclasses.fields(self):
            for tensor in _tensors_of(getattr(self, f.name)):
                tensor.record_stream(stream)

    def _with_tensors(self, move: str, *args: Any, **kwargs: Any) -> Any:
        """The batch with `tensor.move(…)` in place of each tensor."""
        self.check_unchanged()
        moved: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor | AttentionPlan | SegmentPlan | VisionRows | Support):
                moved[f.name] = getattr(value, move)(*args, **kwargs)
            elif isinstance(value, dict) and value and all(map(_moves, value.values())):
                moved[f.name] = {k: getattr(v, move)(*args, **kwargs) for k, v in value.items()}
        batch = dataclasses.replace(self, **moved)
        # not read: the copy may not have arrived yet
        batch.attention_plan.bind(batch.visible_until, batch.visible_from, **batch._rows())
        return batch

    def check_unchanged(self) -> None:
        """Raise ArgumentError for ids, positions or an attention rule that are not those of the pack.

        On a CPU they are read; see `AttentionPlan.check`.
        """
        self.attention_plan.check(self.visible_until, self.visible_from, **self._rows())

    def _rows(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def __repr__(self) -> str:
        own = vars(self)
        tensors = {name: own.get(name) for name in ("input_ids", "pixel_values")}
        for name in ("loss_columns", "token_columns"):
            tensors |= {f"{name}[{k!r}]": v for k, v in (own.get(name) or {}).items()}
        tensors["routed_experts"] = own.get("routed_experts")
        shapes = [_shape(name, x) for name, x in tensors.items() if x is not None]
        if own.get("kept_ids") is not None:
            shapes.append(f"kept_ids={safe_repr(lambda: _lists(own['kept_ids']))}")
        if own.get("teachers"):
            shapes.append(f"teachers={safe_repr(lambda: str(list(own['teachers'])))}")
        parts = [
            safe_repr(lambda: repr(self.family)),
            f"samples={safe_repr(lambda: str(len(self.sample_ids)))}",
            f"loss_tokens={safe_repr(lambda: str(self.num_loss_tokens))}",
            f"media={safe_repr(lambda: str(len(self.media)))}",
            *shapes,
            f"device={safe_repr(lambda: repr(str(self.device)))}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def unpack_tokens(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Cut x [T, …] into one [L, …] tensor per sample; shared rows go to every sample that has them."""
        self._expect(x, self._num_rows, "unpack_tokens", "rows")
        return list(gather_rows(x, self.token_rows).split(self.token_counts))

    def unpack_loss(self, x: OfLoss) -> list[OfLoss]:
        """Cut x [N, …] into one [n, …] tensor per sample; N lists (`kept_ids`, a teacher's) into n lists per sample."""
        if not isinstance(x, Support):
            self._expect(x, self.num_loss_tokens, "unpack_loss", "loss tokens")
        elif len(x) != self.num_loss_tokens:
            raise ArgumentError(
                f"unpack_loss: x has {len(x)} lists, expected {self.num_loss_tokens}. "
                "Fix: pass one list for each of the batch's loss tokens"
            )
        return list(x.split(self.loss_counts))

    def family_of(self) -> Family:
        return get_family(self.family)

    @property
    def _num_rows(self) -> int:
        raise TypeError("a Batch is either packed or padded")

    def _expect(self, x: torch.Tensor, rows: int, what: str, name: str) -> None:
        check_are_tensors(what, x=x)
        if x.ndim == 0 or x.shape[0] != rows:
            raise ArgumentError(
                f"{what}: x has shape {list(x.shape)}, expected [{rows}, …] ({name}). "
                f"Fix: pass one value for each of the batch's {name}"
            )


@dataclass(kw_only=True, repr=False)
class PackedBatch(Batch):
    """One row of T tokens. `visible_until` (and `visible_from`) is the attention rule; other fields: see the bases."""

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [4, T] int64; [1, T] for families with one row of positions
    visible_until: torch.Tensor  # [T] int32
    segment_offsets: torch.Tensor  # [G+1] int32
    segment_parent: torch.Tensor  # [G] int32, -1 for a root
    sample_segment: torch.Tensor  # [B] int32
    cu_seqlens: torch.Tensor | None = None  # [B+1] int32; absent where rows are shared
    max_seqlen: int | None = None
    # in rows, one for each of `media_occurrence` (frames of a video with the text between); media_index counts `media`
    modality_spans: list[ModalitySpan]
    vision_rows: VisionRows  # the same row by row: what `merge_embeddings` reads
    loss_spans: list[list[LossSpan]]  # of each sample, in rows
    num_tokens: int  # rows without the padding at the end
    # how often the towers run on that rank of this micro-batch that needs them most; None: not known
    tower_runs: Counts | None = None

    def unpack_tokens(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As in Batch; where no row is shared, the tensors are views of x."""
        if self.cu_seqlens is None:
            return super().unpack_tokens(x)
        self._expect(x, self._num_rows, "unpack_tokens", "rows")
        return list(x[: self.num_tokens].split(self.token_counts))

    @property
    def _num_rows(self) -> int:
        return len(self.input_ids)


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Support)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch's field: itself, or those of a plan, a table or columns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, AttentionPlan | SegmentPlan | Wave | Support):
        yield from _tensors_of({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_of(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_of(part)


def _shape(name: str, x: Any) -> str:
    return f"{name}={safe_repr(lambda: str(list(x.shape)))}"


def _lists(kept: Support) -> str:
    return f"{len(kept.ids)} ids in {len(kept)} lists"


def refuse_no_accelerator() -> None:
    """Raise BackendError where page-locked memory has no use."""
    if not torch.accelerator.is_available():
        raise BackendError(
            "pin_memory: this machine has no accelerator to copy to. Fix: leave pin_memory out"
        )


def loss_index(sample_rows: list[np.ndarray], samples: list[Any]) -> tuple[LossIndex, list[int]]:
    """Build the LossIndex from each sample's rows [L] (int64); also the loss tokens of each sample."""
    rows, targets, counts = [], [], list[int]()
    runs: list[list[int]] = []
    regions: list[tuple[int, int, int]] = []
    at = 0
    for b, (sample, where) in enumerate(zip(samples, sample_rows, strict=True)):
        begin, length = at, len(sample)
        for span, turn in zip(sample.loss_spans, span_turns(sample), strict=True):
            start, stop = span.start, min(span.stop, length)
            if stop <= start:
                continue
            rows.append(where[start - 1 : stop - 1])
            targets.append(sample.input_ids[start:stop])
            own = [b, -1 if turn is None else turn, start, at, at + stop - start]
            last = runs[-1] if runs else None
            at = own[4]
            if last and last[:2] == own[:2] and last[2] + last[4] - last[3] == start:
                last[4] = at  # the run goes on
            else:
                runs.append(own)
        if sample.region_spans:
            indices = sample.loss_indices
            for region in sample.region_spans:
                first, stop = np.searchsorted(indices, (region.start, region.stop)).tolist()
                regions.append((b, begin + first, begin + stop))
        counts.append(at - begin)
    all_rows, targets_of_all = _joined(rows), _joined(targets)
    unique, inverse = _distinct(all_rows)
    offsets = np.cumsum([0, *counts])
    places = LossPlaces(offsets, _table(runs, 5), _table(regions, 3))
    lengths = places.runs[:, 4] - places.runs[:, 3]
    token = np.arange(at, dtype=np.int32)
    token += np.repeat((places.runs[:, 2] - places.runs[:, 3]).astype(np.int32), lengths)
    turns = np.repeat(to_int32(places.runs[:, 1]).numpy(), lengths)
    index = LossIndex(
        loss_rows=to_int32(all_rows),
        loss_targets=torch.from_numpy(targets_of_all),
        cu_loss=to_int32(offsets),
        loss_rows_unique=to_int32(unique),
        loss_row_inverse=to_int32(inverse),
        loss_turn=torch.from_numpy(turns),
        loss_token_index=torch.from_numpy(token),
        region_rows=to_int32(places.regions),
        loss_places=places,
    )
    return index, counts


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.asarray(rows, dtype=np.int64).reshape(-1, width)


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct of `rows` [N], rising, and the place of each among them."""
    # rows of no shared prefix
    if (rows[1:] > rows[:-1]).all():
        return rows, np.arange(len(rows), dtype=np.int32)
    unique, inverse = np.unique(rows, return_inverse=True)
    return unique, inverse


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
