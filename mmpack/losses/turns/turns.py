"""The K turns of J trajectories: which loss tokens are theirs, whether a sample holds one turn or many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.losses.rewards.scores import scatter_scores
from mmpack.losses.samples import check_column
from mmpack.packing.places import WIDE, LossPlaces
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.turns import span_turns, turn_without_loss, turns_without_loss


@dataclass(frozen=True, eq=False, repr=False)
class Turns:
    """Turns by trajectory and number: those that have loss tokens, and those whose response has none.

    Tensors are on the CPU. A trajectory is the samples of one group with one `trajectory_id`; a sample without one is
    a trajectory of its own.
    """

    trajectory_ids: list[str]  # [J], in order of first appearance; a sample's id where it has none
    group_ids: list[str]  # [J]: whose `mp.group_numbers` are the same on every rank
    group_index: Tensor  # [J] int64, numbered in order of first appearance
    cu_turns: Tensor  # [J+1] int32: the turns of each trajectory
    turn: Tensor  # [K] int64: the number of each turn
    sample_trajectory: Tensor  # [B] int64: `unit_index` of mp.group_advantages
    token_turn: (
        Tensor  # [N] int64: the turn (0 to K-1) of each loss token, samples one after the other
    )
    loss_counts: list[int]  # [B]
    own_scores: list[Sequence[Any]] = field(default_factory=list)  # [B]: rewards of the samples
    layout: Any = None  # where the loss tokens are, as of a batch

    def __len__(self) -> int:
        return len(self.turn)

    def __repr__(self) -> str:
        return f"Turns(trajectories={len(self.trajectory_ids)}, turns={len(self)}, loss_tokens={len(self.token_turn)})"

    def rewards(self, *scores: Any, weights: Mapping[str, float] | None = None) -> Tensor:
        """The sum of each turn's scores, [K] float32: a score belongs to the turn of the last loss token of its scope.

        So a sequence score is its sample's last turn's: the outcome. A score of a turn without loss, or of a region or
        a span in it, is that turn's: it reaches the loss by the returns of earlier turns. Args: scores, weights: as of
        `mp.scatter_rewards`; none: the samples' own rewards.
        """
        given = scores or (self.own_scores,)
        given = tuple(self._of_turns(source) for source in given)
        of_tokens = scatter_scores("Turns.rewards", self.layout, *given, weights=weights)
        summed = np.bincount(self.layout.token_turn, of_tokens.numpy(), len(self))
        return torch.from_numpy(summed).float()

    def _of_turns(self, source: Any) -> Any:
        """Lists of Score, those in turns without loss with the scope of the turn."""
        if not isinstance(source, Sequence) or len(source) != len(self.layout.samples):
            return source
        out = list(source)
        for b, silent in self.layout.silent.items():
            sample, scores = self.layout.samples[b], out[b]
            if not isinstance(scores, Sequence) or isinstance(scores, str):
                continue
            turns = [turn_without_loss(sample, getattr(s, "scope", None), silent) for s in scores]
            out[b] = [
                s if k is None else dataclasses.replace(s, scope={"turn": k})
                for s, k in zip(scores, turns, strict=True)
            ]
        return out

    def columns(self, values: Tensor) -> list[Tensor]:
        """values [K] of turns to their loss tokens: a list of [n], one per sample, for `loss_columns` of `mp.pack`."""
        check_column("Turns.columns", "values", values, len(self), "values", values)
        return list(values.detach().cpu()[self.token_turn].split(self.loss_counts))


def turns_of(samples: Sequence[Sample]) -> Turns:
    """The turns of `samples`, which are whole trajectories: the global batch, before it is planned and packed.

    A loss token is of its span's `turn`; of its sample's where the span has none, or where all spans bear one number
    below it (a processor counts each sample's turns from 0); and of turn 0 where neither has one and the sample is
    all of its trajectory. A turn whose response has no loss token has a number and rewards, and no column. A trajectory
    in one long sample has the turns that it has in samples of one turn each.

    Raises ArgumentError where a sample that shares its trajectory with others has no turn, or several of which one is
    before `Sample.turn`, and for what is no Sample.

    Example: a trajectory of two samples, with a turn each.
        >>> import numpy as np
        >>> import mmpack as mp
        >>> samples = [
        ...     mp.Sample(
        ...         f"s{turn}", "task", "qwen2_vl", np.arange(5, 9), media=[], modality_spans=[],
        ...         loss_spans=[mp.LossSpan(2, 4)], trajectory_id="t", turn=turn,
        ...         rewards=[mp.Score("step", reward)],
        ...     )
        ...     for turn, reward in enumerate([0.0, 1.0])
        ... ]
        >>> turns = mp.losses.turns_of(samples)
        >>> turns
        Turns(trajectories=1, turns=2, loss_tokens=4)
        >>> returns = mp.discounted_returns(turns.rewards(), turns.cu_turns, gamma=0.5)
        >>> returns
        tensor([0.5000, 1.0000])
        >>> mp.pack(samples, loss_columns={"returns": turns.columns(returns)}).loss_columns["returns"]
        tensor([0.5000, 0.5000, 1.0000, 1.0000])
    """
    samples = as_samples(samples, "turns_of")
    numbers: dict[tuple[str, str | None, int], int] = {}
    whose = np.zeros(len(samples), dtype=np.int64)
    for b, sample in enumerate(samples):
        alone = b if sample.trajectory_id is None else -1
        key = (sample.group_id, sample.trajectory_id, alone)
        whose[b] = numbers.setdefault(key, len(numbers))
    sharing = np.bincount(whose, minlength=len(numbers))
    groups: dict[str, int] = {}
    group_index = [groups.setdefault(group, len(groups)) for group, _, _ in numbers]

    turns = [_turns(sample, bool(sharing[j] > 1)) for sample, j in zip(samples, whose, strict=True)]
    counts = [len(of_sample) for of_sample in turns]
    turn = np.concatenate([np.zeros(0, dtype=np.int64), *turns])
    silent = {b: own for b, sample in enumerate(samples) if (own := turns_without_loss(sample))}
    bare = np.array([(b, k or 0) for b, own in silent.items() for k in own], np.int64).reshape(
        -1, 2
    )
    own_keys = np.concatenate(
        [np.repeat(whose, counts) * WIDE + turn, whose[bare[:, 0]] * WIDE + bare[:, 1]]
    )
    keys, inverse = np.unique(own_keys, return_inverse=True)
    inverse = inverse.reshape(-1)
    layout = _layout(samples, turn, counts, bare)
    layout.samples, layout.silent, layout.token_turn = samples, silent, inverse
    return Turns(
        trajectory_ids=[
            samples[alone].sample_id if named is None else named for _, named, alone in numbers
        ],
        group_ids=[group for group, _, _ in numbers],
        group_index=torch.tensor(group_index, dtype=torch.int64),
        cu_turns=torch.from_numpy(np.searchsorted(keys // WIDE, np.arange(len(numbers) + 1))).int(),
        turn=torch.from_numpy(keys % WIDE),
        sample_trajectory=torch.from_numpy(whose),
        token_turn=torch.from_numpy(inverse[: len(turn)]),
        loss_counts=counts,
        own_scores=[sample.rewards or [] for sample in samples],
        layout=layout,
    )


def _turns(sample: Sample, shares: bool) -> np.ndarray:
    """The turn of each loss token of a sample, int64 [n]."""
    numbers, lengths = [], []
    for span, number in zip(sample.loss_spans, span_turns(sample), strict=True):
        if number is None and shares:
            raise ArgumentError(
                f"turns_of: loss tokens [{span.start}, {span.stop}) of sample {sample.sample_id!r} have no "
                f"turn, but trajectory {sample.trajectory_id!r} has several samples. "
                "Fix: set the turn of the sample or of its spans"
            )
        if shares and number is not None and number < (sample.turn or 0):
            raise ArgumentError(
                f"turns_of: loss tokens [{span.start}, {span.stop}) of sample {sample.sample_id!r} are of turn "
                f"{number}, before turn {sample.turn} of the sample. "
                "Fix: number the turns of its spans within the trajectory"
            )
        numbers.append(number or 0)
        lengths.append(min(span.stop, len(sample)) - span.start)
    return np.repeat(np.array(numbers, dtype=np.int64), lengths)


def _layout(
    samples: Sequence[Sample], turn: np.ndarray, counts: list[int], bare: np.ndarray
) -> Any:
    """What `scatter_scores` reads of a batch; behind its loss tokens one place for each of `bare` (sample, turn)."""
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    regions, tokens = [], [np.zeros(0, dtype=np.int64)]
    for b, sample in enumerate(samples):
        indices = sample.loss_indices
        tokens.append(indices)
        for region in sample.region_spans or ():
            first, stop = np.searchsorted(indices, (region.start, region.stop)) + offsets[b]
            regions.append((b, first, stop))
    places = LossPlaces.of(offsets, turn, np.concatenate(tokens), np.array(regions, dtype=np.int64))
    at = len(turn) + np.arange(len(bare))
    more = np.stack([*bare.T, np.zeros_like(at), at, at + 1], axis=1)
    places = dataclasses.replace(places, more=more)
    return SimpleNamespace(
        sample_ids=[sample.sample_id for sample in samples],
        cu_loss=torch.from_numpy(offsets),
        loss_turn=torch.from_numpy(np.concatenate([turn, bare[:, 1]])),
        loss_places=places,
    )
