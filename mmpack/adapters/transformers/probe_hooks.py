"""Forward hooks that hand a model's tensors to a recorder: outputs of modules, and inputs that no module made.

A tensor that was recorded as one module's output is known by identity when the next module reads it, and is not kept
twice. What reaches a module unknown was computed between modules: rotary embedding, attention, a residual sum.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import numpy as np
import torch

from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.calls import calls_of
from mmpack.probe.places import TEXT, Places
from mmpack.probe.record import IN, OUT, Recorder, Rows
from mmpack.probe.tower_rows import TABLE, TowerCall, rows_of_tower, window_order
from mmpack.versions import takes_encoded_media


class BatchRows:
    """Rows of one batch. `members`: numbers of its samples among all that are probed."""

    def __init__(
        self,
        batch: Batch,
        members: list[int],
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
        runs = _runs(members, places, token_rows, starts)
        self.calls = _tower_calls(batch, runs, model)

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
        """The place of the row that predicts each loss token, for values [N]."""
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
    members: list[int],
    places: Places,
    token_rows: np.ndarray,
    starts: np.ndarray,
) -> dict[int, list[int]]:
    """Occurrences of media by the batch's row of their first placeholder, in row order: samples share rows."""
    number = {member: k for k, member in enumerate(members)}
    found: dict[int, list[int]] = {}
    for o, (sample, _, _, token) in enumerate(places.media.tolist()):
        if sample in number and places.placeholders[o]:
            row = int(token_rows[starts[number[sample]] + token])
            found.setdefault(row, []).append(o)
    return dict(sorted(found.items()))


def _tower_calls(batch: Batch, runs: dict[int, list[int]], model: Any) -> list[TowerCall]:
    """The tower's calls in one forward: of a pack as media are encoded before it, else images, then videos, by run.

    Where images and videos have one id, a forward that encodes gets all of them as images.
    """
    vision = getattr(model.config, "vision_config", None)
    order = batch.media_order
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


WRAPPERS = re.compile(
    r"(^|\.)(base_model\.model|module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|modules_to_save\.\w+|"
    r"original_module)(?=\.|$)"
)


def plain_name(name: str) -> str:
    """A module's name without wrappers."""
    return WRAPPERS.sub("", name).lstrip(".")


class Hooks:
    """While it is entered, the model's forward writes to the recorder. For one forward."""

    def __init__(self, whole: Any, rows: BatchRows, recorder: Recorder):
        self.rows, self.recorder = rows, recorder
        self.calls = list(rows.calls)
        self.call: TowerCall | None = None
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        self.handles: list[Any] = []
        vision = {id(m) for part in tower_and_projector(whole).modules for m in part.modules()}
        self.towers = list(tower_and_projector(whole).modules)
        self.chosen = [
            (plain_name(f"model.{name}"), module, id(module) in vision)
            for name, module in _recorded(whole.model)
        ]

    def __enter__(self) -> Hooks:
        tower = self.towers[0] if self.towers else None
        if tower is not None:
            self.handles.append(tower.register_forward_pre_hook(self._next_call, with_kwargs=True))
        for name, module, vision in self.chosen:
            if _reads_rows(module):
                before = self._before(name, vision)
                self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            after = self._after(name, vision, _reads_rows(module))
            self.handles.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.known.clear()

    def _next_call(self, module: Any, args: Any, kwargs: Any) -> None:
        self.call = self.calls.pop(0) if self.calls else None

    def _before(self, name: str, vision: bool) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            values = list(args)
            if "rotary" in name.rpartition(".")[2]:
                positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
                if torch.is_tensor(positions):
                    self._put(name, IN, [positions], vision)
                return None
            where: Any = next((i for i, v in enumerate(values) if _is_float(v)), None)
            named = next((k for k, v in kwargs.items() if _is_float(v)), "")
            given = values[where] if where is not None else kwargs.get(named) if named else None
            if given is None:
                return None
            if (source := self._source(given)) is not None:
                # where the other side adds something to it first, as deepstack's features, that one has an entry
                self.recorder.alias(name, IN, source)
                return None
            made = self.recorder.shaken(given)
            self._put(name, IN, [made], vision)
            if made is given:
                return None
            if where is not None:
                values[where] = made
            else:
                kwargs = kwargs | {named: made}
            return tuple(values), kwargs

        return hook

    def _after(self, name: str, vision: bool, leaf: bool) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            parts = list(output) if type(output) in (tuple, list) else [output]
            tensors = _of_rows(parts)
            # what passes through a module of modules is what one of them returned
            passed = not leaf and all(self._source(parts[i]) is not None for i in tensors)
            if not tensors:
                return None
            if passed:
                self.recorder.alias(name, OUT, str(self._source(parts[tensors[0]])))
                return None
            given = next((a for a in args if _is_float(a)), None)
            read = self._source(given) if leaf and "rotary" not in name else None
            terms = 1 if given is None else given.shape[-1] if given.ndim < 4 else given[0].numel()
            before = [parts[i] for i in tensors]
            for i in tensors:
                parts[i] = self.recorder.shaken(parts[i])
            self._put(name, OUT, [parts[i] for i in tensors], vision, read, terms)
            if all(parts[i] is b for i, b in zip(tensors, before, strict=True)):
                return None
            return type(output)(parts) if type(output) in (tuple, list) else parts[0]

        return hook

    def _put(
        self,
        name: str,
        side: str,
        tensors: list[torch.Tensor],
        vision: bool,
        source: str | None = None,
        terms: int = 1,
    ) -> None:
        laid = [found for t in tensors if (found := self._laid(name, t, vision)) is not None]
        if not laid:
            self.recorder.record.unplaced.add(f"{name}<{side}")
            return
        rows = laid[0][1]
        values = [v for v, r in laid if r is rows]
        joined = values[0] if len(values) == 1 else torch.cat([v.double() for v in values], 1)
        entry = self.recorder.put(name, side, joined, rows, source, terms)
        for t in tensors:
            self.known[id(t)] = (weakref.ref(t), _version(t), entry)

    def _laid(
        self, name: str, tensor: torch.Tensor, vision: bool
    ) -> tuple[torch.Tensor, Rows] | None:
        """The tensor as [rows, …], and its rows; None if it has no axis of rows."""
        if not vision:
            shape = tuple(self.rows.batch.input_ids.shape)
            flat = as_rows(tensor, self.rows.count, shape, "rotary" in name)
            return None if flat is None else (flat, self.rows.text)
        if self.call is None or tensor.ndim < 2:
            return None
        if TABLE.search(name) and len(tensor) != self.call.total:
            return None
        flat = _tower_rows(tensor, self.call.total)
        rows = rows_of_tower(self.call, self.rows.places, len(flat), name)
        return None if rows is None else (flat, rows)

    def _source(self, tensor: Any) -> str | None:
        """The entry that holds this very tensor, or the one that it is a view of."""
        if not torch.is_tensor(tensor):
            return None
        whole = [tensor] if tensor._base is None else [tensor, tensor._base]
        for t in whole:
            found = self.known.get(id(t))
            if found is None or found[0]() is not t or found[1] != _version(t):
                continue
            if t.numel() == tensor.numel():
                return found[2]
        return None


def as_rows(
    tensor: torch.Tensor, count: int, shape: tuple[int, ...], angles: bool = False
) -> torch.Tensor | None:
    """A tensor with the axes B and S (1 and T of a pack), or one of `count` rows, as [count, …]; None of others.

    The last axis of floats is of features; ids and positions have none. B and S come first in activations, last in
    positions and `angles` ([3, B, S, …]); heads may stand between them, [B, heads, S, …]. Where two axes could be S,
    as with S heads, the rows can't be told: None. `shape`: of the batch's input_ids.
    """
    batch, length = shape if len(shape) == 2 else (1, count)
    sizes = tensor.shape[: tensor.ndim - tensor.is_floating_point()]
    firsts = [i for i, size in enumerate(sizes) if size == batch and length in sizes[i + 1 :]]
    if firsts:
        first = firsts[0] if tensor.is_floating_point() and not angles else firsts[-1]
        found = [j for j in range(first + 1, len(sizes)) if sizes[j] == length]
        if len(found) > 1:
            return None
        return tensor.movedim((first, found[0]), (0, 1)).reshape(count, -1)
    if count not in sizes:
        return None
    return tensor.movedim(sizes.index(count), 0).reshape(count, -1)


def _tower_rows(tensor: torch.Tensor, patches: int) -> torch.Tensor:
    """[patches, …] or [1, patches, …] by row; of tiles [tiles, tokens, H] too; of pixels by patch or tile."""
    if tensor.shape[0] == 1 and tensor.ndim > 2:
        tensor = tensor[0]
    if not tensor.is_floating_point():
        return tensor.movedim(-1 if tensor.shape[0] != patches else 0, 0).flatten(1)
    if (
        tensor.ndim == 3
        and tensor.shape[0] < patches
        and tensor.shape[0] * tensor.shape[1] >= patches // 4
    ):
        return tensor.flatten(0, 1)
    return tensor.reshape(len(tensor), -1)


def _recorded(core: Any) -> list[tuple[str, torch.nn.Module]]:
    """Every module but those inside an adapter's layer or a bank of experts, which count as one."""
    out: list[tuple[str, torch.nn.Module]] = []

    def walk(name: str, module: torch.nn.Module) -> None:
        for child_name, child in module.named_children():
            whole = f"{name}.{child_name}" if name else child_name
            if not isinstance(child, torch.nn.ModuleList):
                out.append((whole, child))
            if not (hasattr(child, "base_layer") or child_name == "experts"):
                walk(whole, child)

    walk("", core)
    return out


def _reads_rows(module: torch.nn.Module) -> bool:
    """Whether the module's own input is recorded: that of a leaf, or of one that counts as one."""
    whole = hasattr(module, "base_layer") or not any(True for _ in module.children())
    return whole and not isinstance(module, torch.nn.Embedding)


def _version(tensor: torch.Tensor) -> int:
    """Counts changes in place; tensors of inference mode don't count them."""
    return 0 if tensor.is_inference() else tensor._version


def _of_rows(parts: list[Any]) -> list[int]:
    """Which parts of an output are rows: the first, and what has as many axes, as a rotary embedding's cos and sin.

    Attention's weights [B, heads, rows, rows], returned with its output [B, rows, H], are not: their columns are keys.
    """
    found = [i for i, v in enumerate(parts) if _is_float(v)]
    return [i for i in found if parts[i].ndim == parts[found[0]].ndim]


def _is_float(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()
