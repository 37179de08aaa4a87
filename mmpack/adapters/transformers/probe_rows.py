"""Which row of a batch's tensors goes to which place of the probe: text rows, tower rows, head rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.transformers.tower import takes_encoded_media
from mmpack.errors import ModelError
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.calls import calls_of
from mmpack.probe.places import TEXT, Places
from mmpack.probe.record import Rows
from mmpack.probe.tower_rows import TowerCall, window_order
from mmpack.schema.sample import Sample


class BatchRows:
    """Of one batch. `members`: numbers of its samples among all that are probed."""

    def __init__(
        self,
        batch: Batch,
        members: list[int],
        samples: Sequence[Sample],
        places: Places,
        model: Any,
    ):
        self.batch, self.places = batch, places
        self.count = batch._num_rows
        self.members = members
        starts = np.concatenate([[0], np.cumsum(batch.token_counts)])
        token_rows = batch.token_rows.cpu().numpy()
        take, into = [], []
        self.place_of: list[dict[int, int]] = []
        for k, member in enumerate(members):
            at, tokens = places.chosen(member)
            take.append(token_rows[starts[k] + tokens])
            into.append(at)
            self.place_of.append(dict(zip(tokens.tolist(), at.tolist(), strict=True)))
        self.text = Rows(TEXT, torch.from_numpy(np.concatenate(take)), np.concatenate(into))
        runs = _runs(samples, members, places, token_rows, starts)
        self.calls = _tower_calls(batch, runs, places, model)

    def head_rows(self) -> tuple[Rows, torch.Tensor] | None:
        """Places of rows that predict loss tokens, and the rows; each place once."""
        found: dict[int, int] = {}
        for place, row, _ in self._loss():
            found.setdefault(place, row)
        if not found:
            return None
        into = np.array(list(found), dtype=np.int64)
        rows = torch.tensor(list(found.values()))
        return Rows(TEXT, torch.arange(len(into)), into), rows

    def loss_rows(self) -> list[Rows]:
        """Of values [N] by loss token: the place of the row that predicts it."""
        found = {place: n for place, _, n in self._loss()}
        if not found:
            return []
        into = np.array(list(found), dtype=np.int64)
        return [Rows(TEXT, torch.tensor(list(found.values())), into)]

    def _loss(self) -> list[tuple[int, int, int]]:
        """(place, row, loss token n) where the row before the loss token is recorded."""
        batch = self.batch
        rows, tokens = batch.loss_rows.tolist(), batch.loss_token_index.tolist()
        ends = batch.cu_loss.tolist()
        out = []
        for k, places in enumerate(self.place_of):
            for n in range(ends[k], ends[k + 1]):
                place = places.get(tokens[n] - 1)
                if place is not None:
                    out.append((place, rows[n], n))
        return out


def _runs(
    samples: Sequence[Sample],
    members: list[int],
    places: Places,
    token_rows: np.ndarray,
    starts: np.ndarray,
) -> dict[int, list[int]]:
    """Occurrences of media by the batch's row of their first placeholder, in row order: samples share rows."""
    if len(samples) + 1 != len(starts):
        raise ModelError(
            "probe: packing dropped some samples. Fix: pass samples that mp.validate accepts"
        )
    number = {member: k for k, member in enumerate(members)}
    found: dict[int, list[int]] = {}
    for o, (sample, _, _, token) in enumerate(places.media.tolist()):
        if sample in number and places.placeholders[o]:
            row = int(token_rows[starts[number[sample]] + token])
            found.setdefault(row, []).append(o)
    return dict(sorted(found.items()))


def _tower_calls(
    batch: Batch, runs: dict[int, list[int]], places: Places, model: Any
) -> list[TowerCall]:
    """The tower's calls in one forward: of a pack as media are encoded before it, else images, then videos, by run.

    Where images and videos have one id, a forward that encodes gets all of them as images.
    """
    vision = getattr(model.config, "vision_config", None)
    order = batch.media_order
    if len(runs) != len(order):
        raise ModelError(
            f"probe: the batch has {len(order)} runs of placeholders, its samples {len(runs)}. "
            "Fix: pass samples that mp.validate accepts"
        )
    made = list(zip(order, runs.values(), strict=True))
    family = batch.family_of()
    if isinstance(batch, PackedBatch) and takes_encoded_media(model):
        of: dict[int, list[int]] = {i: [] for i in range(len(batch.media))}
        for i, occurrences in made:
            of[i] += occurrences
        together = [[(i, of[i]) for i in call.media] for call in calls_of(family, batch.media)]
    elif family.video_bounds is not None:
        together = [made]
    else:
        together = [
            [(i, o) for i, o in made if batch.media[i].modality == modality]
            for modality in family.placeholder_ids
        ]
    calls = []
    for own in filter(None, together):
        media = [batch.media[i] for i, _ in own]
        orders = [window_order(medium.grid_thw, vision) for medium in media]
        calls.append(TowerCall([o for _, o in own], [m.num_patches for m in media], orders))
    return calls
