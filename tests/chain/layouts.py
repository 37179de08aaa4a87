"""A model of tiny or real widths, its exact copy, and the layouts that its step is compared in."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from chain.compare import Row, compare
from chain.step import Part, Problem, Record, draw, make_problem, run
from chain.tape import STAGES, TOWER
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.step.models import MODELS, Shape, random_model
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.errors import check_name
from mmpack.invariant import batch_invariant
from mmpack.packing.batch import Batch
from mmpack.packing.pack import pack
from mmpack.packing.pad import pad

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES = {"qwen2.5-vl": MODELS["qwen2.5-vl-7b"], "qwen3-vl": MODELS["qwen3-vl-8b"]}
SIZES = ("tiny", "layer")
EVERY = [(stage, way) for stage in STAGES for way in ("forward", "backward")]


def layouts(problem: Problem) -> Iterator[tuple[str, str, list[Part]]]:
    """Yield axis, value and batches of each layout."""
    every, device = range(len(problem.samples)), problem.old.device

    def part(make: Any, chosen: Any, **options: Any) -> Part:
        return Part(make([problem.samples[i] for i in chosen], **options).to(device), tuple(chosen))

    yield "batch", "2", [part(pad, some, side="right") for some in (every[:2], every[2:])]
    for other in problem.companions:
        batch = pack([other, *problem.samples]).to(device)
        yield "pictures", str(len(other.media)), [Part(batch, (None, *every))]
    yield "padding", "left", [part(pad, every, side="left")]
    yield "padding", "right", [part(pad, every, side="right")]
    yield "packed", "in order", [part(pack, every)]
    yield "packed", "reversed", [part(pack, every[::-1])]
    yield "shared", "prefix", [part(pack, every, share_prefix=True)]


def alone(problem: Problem, make: Any = pack) -> list[Part]:
    """A batch of each sample; `make=pad`: for transformers' own attention."""
    device = problem.old.device
    return [Part(make([s]).to(device), (i,)) for i, s in enumerate(problem.samples)]


def equal_stages(axis: str) -> frozenset[tuple[str, str]]:
    """What `mmpack.invariant` holds equal bit for bit.

    The loss is a sum over batches, whose parts are rounded; branches of a shared prefix are added first, and so are
    gradients to a picture that several samples have.
    """
    forward = {key for key in EVERY if key[1] == "forward" and key[0] != "loss"}
    backward = {key for key in EVERY if key[1] == "backward" and key[0] not in TOWER}
    return frozenset(forward if axis == "shared" else forward | backward)


@dataclass
class Chain:
    """A model and what every layout is compared with.

    `beside`: rows of the reference itself beside transformers' own attention and torch's head, in the same dtype:
    what the reference is off is allowed to every layout, so it is held to them first.
    """

    model: Any
    problem: Problem
    reference: Record
    exact: Record
    beside: list[Row]
    invariant: bool

    def take(self, parts: list[Part]) -> Record:
        with batch_invariant(self.model) if self.invariant else contextlib.nullcontext():
            return run(self.model, self.problem, parts)

    def rows(self, axis: str, value: str, record: Record) -> list[Row]:
        equal = equal_stages(axis) if self.invariant else frozenset()
        return compare(axis, value, record, self.reference, self.exact, self.problem, equal)

    def every_row(self) -> list[Row]:
        out = list(self.beside)
        for axis, value, parts in layouts(self.problem):
            out += self.rows(axis, value, self.take(parts))
        return out


def prepare(
    model: str = "qwen2.5-vl",
    size: str = "tiny",
    dtype: str = "float32",
    device: str = "cpu",
    invariant: bool = False,
) -> Chain:
    """Return the model in evaluation mode, the problem, the reference, and the exact values of a wider copy."""
    for name, given, names in (
        ("model", model, FAMILIES),
        ("size", size, SIZES),
        ("dtype", dtype, DTYPES),
    ):
        check_name("chain", name, given, names)
    shape = shape_of(model, size)
    made = random_model(shape, torch.device(device), DTYPES[dtype]).eval()
    # float64 costs little where the model is tiny, and a GPU's float32 is wide enough beside bfloat16
    wide = exact_copy(made, torch.float64 if size == "tiny" else torch.float32)
    samples, companions = draw(shape.family, size, 0)
    blank = torch.zeros(sum(s.num_loss_tokens for s in samples), device=device)
    problem = make_problem(samples, companions, blank, 0)
    with torch.no_grad():
        logprobs = [exact_logprobs(wide, part.batch) for part in alone(problem, pad)]
    problem = make_problem(samples, companions, torch.cat(logprobs), 0)
    exact = run(wide, problem, alone(problem, pad), exact_logprobs)
    del wide
    plain = run(made, problem, alone(problem, pad), plain_logprobs)
    chain = Chain(made, problem, plain, exact, [], invariant)
    chain.take(alone(problem))  # some modules note things in their first forward
    chain.reference = chain.take(alone(problem))
    chain.beside = compare("alone", "attached", chain.reference, plain, exact, problem)
    return chain


def shape_of(model: str, size: str) -> Shape:
    """Two layers of real widths; or a tiny model with logits that are far from even."""
    real = FAMILIES[model]
    deep = {"deepstack_visual_indexes": [0, 1]} if real.family == "qwen3_vl" else {}
    windows = {"fullatt_block_indexes": [1]} if real.family == "qwen2_5_vl" else {}
    vision = real.vision | {"depth": 2} | deep | windows
    text = real.text | {"num_hidden_layers": 2}
    if size == "layer":
        return replace(real, text=text, vision=vision)
    widths = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    sections = {"mrope_section": [3, 3, 2] if deep else [2, 1, 1]}
    text |= widths | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": real.text["rope_parameters"] | sections,
    }
    if "head_dim" in text:
        text["head_dim"] = 16
    vision |= widths | {"num_heads": 4, "out_hidden_size": 64}
    return replace(real, text=text, vision=vision)


class Wide(TorchFunctionMode):
    """Casts to float32 become casts to float64: norms and rotary angles are float32 whatever the model's dtype is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **given)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def exact_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model in `dtype`, float32 or float64, whose forward casts its inputs."""
    wide = copy.deepcopy(model).to(dtype)

    def cast(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {
            name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
            for name, x in kwargs.items()
        }

    wide.model.register_forward_pre_hook(cast, with_kwargs=True)
    return wide


def exact_logprobs(wide: Any, batch: Batch) -> Tensor:
    """[N] of a padded batch: the model's own forward, all logits of the loss rows, torch's log_softmax."""
    double = next(wide.parameters()).dtype == torch.float64
    with Wide() if double else contextlib.nullcontext():
        return _chosen(_logits(wide, batch), batch)


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    """The same in the model's own dtype, as trainers have them: log_softmax of float32."""
    return _chosen(_logits(model, batch).float(), batch)


def _logits(model: Any, batch: Batch) -> Tensor:
    hidden = model.model(**model_inputs(batch, model)).last_hidden_state
    logits: Tensor = model.lm_head(hidden.flatten(0, 1)[batch.loss_rows.long()])
    return logits


def _chosen(logits: Tensor, batch: Batch) -> Tensor:
    return logits.log_softmax(-1).gather(1, batch.loss_targets[:, None])[:, 0]
