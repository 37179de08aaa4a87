"""Routing replay (R3, arXiv 2510.11370): experts as a trace recorded them, weights by the model's own router.

Routes [T, layers, k] go through the model's forward as the keyword `routed_experts`. A hook of each layer's attention
takes them out and leaves the layer's own [T, k] for its router, whose hook gives these out in place of what it would
take. As a keyword they are also what gradient checkpointing runs a layer with again: some transformers run its hooks
again too, others what is within them only.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from mmpack.adapters.transformers.modules import decoder_layers
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, ModelError, kind_of
from mmpack.packing.batch import Batch
from mmpack.versions import checkpointing_runs_hooks

ROWS = 16  # of made-up hidden states
EACH = "per_expert_scale"  # of Gemma 4
# of what a router gives first: logits, or probabilities already
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "given": lambda probabilities: probabilities,
}


def is_router(module: Any) -> bool:
    """One of transformers' routers, which give (logits or probabilities, weights, ids)."""
    plain = all(hasattr(module, name) for name in ("top_k", "num_experts", "hidden_dim"))
    named = "router" in type(module).__name__.lower()
    return named and (plain or hasattr(module, EACH))


def experts_of(router: Any) -> int:
    """How many there are."""
    return int(getattr(router, "num_experts", None) or router.config.num_experts)


def chosen_of(router: Any) -> int:
    """How many a token takes."""
    return int(getattr(router, "top_k", None) or router.config.top_k_experts)


@dataclass(frozen=True)
class Rule:
    """Scores of all experts in float32, those of the ids taken, divided by their sum or not, times `scale`."""

    score: str  # of SCORES
    normalised: bool
    scale: float = 1.0
    scales: str | None = None  # the router's parameter with a scale for each expert

    def weights(self, logits: torch.Tensor, ids: torch.Tensor, router: Any = None) -> torch.Tensor:
        """float32 [T, k] of logits [T, E] at ids int64 [T, k]; differentiable in the logits, of all experts or of k.

        `router`: whose `scales` they are multiplied by.
        """
        taken = SCORES[self.score](logits.float()).gather(-1, ids)
        if self.normalised:
            taken = taken / taken.sum(-1, keepdim=True)
        if self.scales is not None:
            taken = taken * getattr(router, self.scales)[ids]
        return taken if self.scale == 1 else taken * self.scale


def rule_of(router: Any) -> Rule:
    """The rule of a router of transformers' (logits, weights, ids), found by its own code on made-up numbers.

    Raises: ModelError for a router that weighs by another rule.
    """
    each = EACH if hasattr(router, EACH) else None
    asked = _drawn_copy(router, torch.Generator().manual_seed(0)) if is_router(router) else None
    answer = None if asked is None else _answer(asked, router)
    if isinstance(answer, tuple) and len(answer) == 3:
        logits, weights, ids = answer
        scale = float(getattr(router, "routed_scaling_factor", 1.0))
        for score, normalised in product(SCORES, (True, False)):
            rule = Rule(score, normalised, scale, each)
            found = rule.weights(logits, ids, asked)
            if torch.allclose(found, weights.float(), rtol=1e-5, atol=1e-7):
                return rule
    raise ModelError(
        f"routed_experts: {type(router).__name__} weighs its experts by a rule that replay does not know. "
        "Fix: set routed_experts of the samples to None, and correct for the drift (correction='tis')"
    )


def _drawn_copy(module: Any, generator: torch.Generator) -> Any:
    """The module without hooks, with weights that are drawn: its own may be sharded, or on meta."""
    out = copy.copy(module)
    state = vars(out)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {
            name: None if value is None else _drawn(generator, *value.shape)
            for name, value in state[kind].items()
        }
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        state[kind] = type(state[kind])()
    state["_modules"] = {
        name: None if child is None else _drawn_copy(child, generator)
        for name, child in state["_modules"].items()
    }
    return out


def _answer(asked: Any, router: Any) -> Any:
    """What the router's own forward gives for made-up hidden states."""
    generator = torch.Generator().manual_seed(1)
    width = getattr(router, "hidden_dim", None) or router.hidden_size
    if "weight" in vars(asked)["_parameters"]:  # a shard may be flat
        vars(asked)["_parameters"]["weight"] = _drawn(generator, experts_of(router), width)
    with torch.no_grad():
        return type(router).forward(asked, _drawn(generator, ROWS, width))


def _drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


KEYWORD = "routed_experts"
SLOT = "_mmpack_route_slot"  # on a layer, its attention and its router: the same object
SLOTS = "_mmpack_route_slots"  # on the model below its head
WHOLE = (torch.uint8, torch.int16, torch.int32, torch.int64)


class Slot:
    """What a layer and its router share."""

    def __init__(self, layer: int, nth: int):
        self.layer = layer  # its number
        self.nth = nth  # its number among those with experts
        self.layers = 0  # how many there are with experts
        self.rule: Rule | None = None
        self.within = False  # whether a module of the layer, before its router, gets the keyword
        # [T, k], from the layer's start until its router took them
        self.routes: torch.Tensor | None = None
        self.handed = False  # in this forward
        self.records = False
        self.taken: torch.Tensor | None = None  # int64 [T, k] of the last forward, where it records

    def column(self, layers: int) -> int:
        """Where its routes are among those of `layers`: of each layer with experts, or of all, dense ones too."""
        return self.nth if layers == self.layers else self.layer


class Routes:
    """The experts that the last forward took, in `record_routes`."""

    def __init__(self, slots: list[Slot]):
        self._slots = slots

    @property
    def rows(self) -> torch.Tensor:
        """int64 [rows, layers, k]: of the forward's rows, and of the layers that have experts.

        Raises: ModelError before a forward.
        """
        taken = [slot.taken for slot in self._slots if slot.taken is not None]
        if len(taken) < len(self._slots):
            raise ModelError(
                "record_routes: no forward ran within the block. Fix: run one, then read rows"
            )
        return torch.stack(taken, dim=1)


@contextlib.contextmanager
def record_routes(model: Any) -> Iterator[Routes]:
    """Keep which experts the model's routers take, of the last forward within the block: `routes.rows`.

    For a rollout by transformers, for the trainer's side of `logprob_drift(routed_experts=)`, and for replay of a
    trainer's own first pass in its later ones: `batch.routed_experts = routes.rows`. Of a packed batch they are
    [T, layers, k], of a padded one [B·S, layers, k]; `batch.unpack_tokens(routes.rows)` cuts them by sample.

    Raises: ModelError for a model without experts, or with routers that give no ids.
    """
    whole = unwrap(model, "record_routes")
    slots = take_routes(whole)
    if not slots:
        raise ModelError(
            f"record_routes: {type(whole).__name__} has no experts, or its routers in "
            "this transformers do not return their choice. Fix: leave out record_routes, or upgrade transformers"
        )
    _learn_rules(whole)
    for slot in slots:
        slot.records, slot.taken = True, None
    try:
        yield Routes(slots)
    finally:
        for slot in slots:
            slot.records = False


def take_routes(whole: Any) -> list[Slot]:
    """Let the model's forward take `routed_experts=`; the slots of its layers with experts, none for a dense model.

    The hooks stay, and pass other forwards on as they are.
    """
    core = whole.model
    if SLOTS in vars(core):
        found: list[Slot] = vars(core)[SLOTS]
        return found
    slots: list[Slot] = []
    for number, layer in enumerate(decoder_layers(whole)):
        routers = [module for module in layer.modules() if is_router(module)]
        if len(routers) > 1:
            raise ModelError(
                f"routed_experts: layer {number} of {type(whole).__name__} has {len(routers)} routers, but "
                "routes are for one per layer. Fix: set routed_experts of the samples to None"
            )
        for router in routers:
            slot = Slot(number, len(slots))
            slots.append(slot)
            setattr(layer, SLOT, slot)
            setattr(router, SLOT, slot)
            layer.register_forward_pre_hook(_hand_over, with_kwargs=True)
            layer.register_forward_hook(_check_taken)
            for module in layer.children():
                if _takes_keywords(module) and router not in module.modules():
                    setattr(module, SLOT, slot)
                    slot.within = True
                    module.register_forward_pre_hook(_take_out, with_kwargs=True)
            router.register_forward_hook(_exchange)
    for slot in slots:
        slot.layers = len(slots)
    setattr(core, SLOTS, slots)
    if slots:
        core.register_forward_pre_hook(_begin, with_kwargs=True)
        core.register_forward_hook(_check_handed, with_kwargs=True)
    return slots


def routes_of(batch: Batch, whole: Any, what: str) -> list[torch.Tensor]:
    """The batch's routes [rows, k] for each layer that has experts; the model's forward takes them from now on.

    Raises: ArgumentError for what are no routes, or of other rows; ModelError for a model without experts, with other
    layers, another k or fewer experts, or one that weighs them by an unknown rule.
    """
    routes = _rows_of(batch, what)
    name, slots, count = type(whole).__name__, take_routes(whole), len(decoder_layers(whole))
    why = None
    if not slots:
        raise ModelError(
            f"{what}: the batch has routed_experts, {name} has no experts. "
            "Fix: set routed_experts of the samples to None"
        )
    _, layers, k = routes.shape
    routers = _routers(whole)
    if layers not in (len(slots), count):
        of = f"{len(slots)} layers with experts" + ("" if len(slots) == count else f" of {count}")
        why = f"has {layers} layers, {name} has {of}"
    elif any(chosen_of(router) != k for router in routers):
        why = f"has {k} experts per token, {name} takes {chosen_of(routers[0])}"
    elif not 0 <= (odd := _outermost_expert(batch)) < experts_of(routers[0]):
        why = f"names expert {odd}, {name} has {experts_of(routers[0])} per layer"
    if why is not None:
        raise ModelError(
            f"{what}: routed_experts {why}. Fix: pass routes from an engine that runs this model"
        )
    _learn_rules(whole)
    return [routes[:, slot.column(layers)] for slot in slots]


def num_experts(whole: Any) -> int:
    """Number of experts of each layer that has some; 0 for a dense model."""
    routers = _routers(whole)
    return experts_of(routers[0]) if routers else 0


def recorded_rows(routes: torch.Tensor) -> torch.Tensor:
    """bool [T, 1] of routes [T, k]: rows that an engine recorded. One expert k times says that it did not."""
    if routes.shape[1] == 1:
        return torch.ones_like(routes, dtype=torch.bool)
    return (routes[:, 1:] != routes[:, :1]).any(dim=1, keepdim=True)


# ---- hooks: functions, so that deep copies and pickles of a model have them too -----------------------


def _begin(core: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Begin a record when the forward of the model below its head starts."""
    routes = kwargs.get(KEYWORD)
    if routes is None:
        return
    if any(slot.rule is None for slot in vars(core)[SLOTS]):
        raise ModelError(
            "routed_experts: the routes were not checked against this model. "
            "Fix: call model(**model_inputs(batch, model))"
        )
    for slot in vars(core)[SLOTS]:
        slot.handed = False


def _check_handed(core: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if kwargs.get(KEYWORD) is None:
        return
    for slot in vars(core)[SLOTS]:
        if not slot.handed:
            raise ModelError(
                f"routed_experts: no routes reached layer {slot.layer}: the model's forward passes its layers "
                "no keywords. "
                "Fix: set routed_experts of the samples to None"
            )


def _hand_over(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer: its own routes [T, k] in the place of all. Outside of its graph, which all layers share."""
    slot = vars(layer)[SLOT]
    routes = kwargs.get(KEYWORD)
    slot.routes = None
    if routes is None:
        return args, kwargs
    checkpointed = layer.training and getattr(layer, "gradient_checkpointing", False)
    if checkpointed and not (slot.within or checkpointing_runs_hooks()):
        raise ModelError(
            f"routed_experts: gradient checkpointing would run layer {slot.layer} again with other experts. "
            "Fix: call model.gradient_checkpointing_disable()"
        )
    slot.routes, slot.handed = routes[:, slot.column(routes.shape[1])], True
    return args, kwargs | {KEYWORD: slot.routes}


def _take_out(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer's attention, which has no use for the keyword."""
    if KEYWORD not in kwargs:
        return args, kwargs
    vars(module)[SLOT].routes = kwargs[KEYWORD]
    return args, {name: value for name, value in kwargs.items() if name != KEYWORD}


def _check_taken(layer: Any, args: Any, output: Any) -> None:
    slot = vars(layer)[SLOT]
    if slot.routes is not None:
        slot.routes = None
        raise ModelError(
            f"routed_experts: the experts of layer {slot.layer} ran without their router (a kernel took its place). "
            "Fix: use the model's own layers, or set routed_experts of the samples to None"
        )


def _exchange(router: Any, args: Any, output: Any) -> Any:
    """The router's (logits, weights, ids) with the ids that are replayed, and weights at these."""
    slot = vars(router)[SLOT]
    routes = slot.routes
    if routes is not None:
        slot.routes = None
        output = _replayed(router, slot.rule, routes, output)
    if slot.records:
        slot.taken = output[2].detach()
    return output


def _replayed(router: Any, rule: Rule, routes: torch.Tensor, output: Any) -> Any:
    logits, weights, own = output
    if routes.shape[0] != own.shape[0]:
        raise ModelError(
            f"routed_experts: there are {routes.shape[0]} rows of routes, the router has {own.shape[0]} rows. "
            "Fix: pass batch.routed_experts, as mp.pack made it"
        )
    ids = torch.where(recorded_rows(routes), routes.to(own.dtype), own)
    return logits, rule.weights(logits, ids, router).to(weights.dtype), ids


# ---- helpers -----------------------------------------------------------------------------------------


def _routers(whole: Any) -> list[Any]:
    return [m for layer in decoder_layers(whole) for m in layer.modules() if is_router(m)]


def _takes_keywords(module: Any) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _outermost_expert(batch: Batch) -> int:
    """The largest id, or one below 0. Read from a GPU only where routes were put into a batch that had none."""
    routes = batch.routed_experts
    assert routes is not None
    if batch.last_expert is None or routes.device.type == "cpu":
        low, high = (int(x) for x in routes.aminmax())
        if low < 0:
            return low
        batch.last_expert = high
    return batch.last_expert


def _rows_of(batch: Batch, what: str) -> torch.Tensor:
    """The batch's routes, integers [rows, layers, k] for each of its rows. Raises: ArgumentError."""
    routes: Any = batch.routed_experts
    rows = batch.input_ids.numel()
    known = isinstance(routes, torch.Tensor)
    if known and routes.dtype in WHOLE and routes.ndim == 3 and len(routes) == rows:
        out: torch.Tensor = routes
        return out
    found = f"{routes.dtype} {list(routes.shape)}" if known else kind_of(routes)
    raise ArgumentError(
        f"{what}: routed_experts is {found}, expected integers [{rows}, layers, k]. "
        "Fix: pass batch.routed_experts, as mp.pack made it"
    )


def _learn_rules(whole: Any) -> None:
    for slot, router in zip(take_routes(whole), _routers(whole), strict=True):
        slot.rule = slot.rule or rule_of(router)


# ---- the load-balancing loss ------------------------------------------------------------------------


def router_loss(
    model: Any, batch: Batch, router_logits: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """transformers' own `load_balancing_loss_func` (Switch Transformers, equations 4 to 6) over the rows of `batch`.

    Rows of a shared prefix are routed once and count once. So the loss of a shared pack is that of a pack without
    sharing in which a prefix's later copies have no weight; it is not that of the copies all counted. The model's own
    `aux_loss` counts the rows that `pad_to_multiple_of` adds.

    Of a batch with `routed_experts` the share of tokens per expert (f, equation 5) is that of the experts replayed,
    where the tokens went; the model's own `aux_loss` counts those that its routers would have taken. Probabilities (P,
    equation 6) are of the model's logits either way, and so are gradients.

    Args: `router_logits`: of a forward with `output_router_logits=True`, [rows, experts] per layer.
    Returns: scalar, without the model's coefficient. Raises: ModelError for a model or an output without experts.
    """
    whole = unwrap(model, "router_loss")
    loss = getattr(sys.modules[type(whole).__module__], "load_balancing_loss_func", None)
    if loss is None:
        raise ModelError(
            f"router_loss: {type(whole).__name__} has no experts, or transformers has no loss for them (a bias "
            "balances them). Fix: leave out router_loss"
        )
    if not router_logits:
        raise ModelError(
            "router_loss: there are no router logits. "
            "Fix: pass those of model(…, output_router_logits=True).router_logits"
        )
    text = whole.config.get_text_config()
    rows = torch.zeros(batch.input_ids.numel(), dtype=torch.int64, device=batch.device)
    rows[batch.token_rows] = 1
    if batch.routed_experts is not None:
        return _replayed_loss(routes_of(batch, whole, "router_loss"), router_logits, rows)
    out: torch.Tensor = loss(
        router_logits, num_experts(whole), text.num_experts_per_tok, rows.view(1, -1)
    )
    return out


def _replayed_loss(
    routes: list[torch.Tensor], router_logits: tuple[torch.Tensor, ...], rows: torch.Tensor
) -> torch.Tensor:
    """experts · Σ f · P, both means over counted rows of all layers.

    Args: `routes`: [rows, k] per layer. `rows`: 1 for a row that counts.
    """
    experts = router_logits[0].shape[-1]
    counted = rows.to(torch.float32)[:, None]
    total = counted.sum() * len(router_logits)
    tokens = torch.zeros(experts, device=rows.device)
    share = torch.zeros(experts, device=rows.device)
    for own, logits in zip(routes, router_logits, strict=True):
        k = own.shape[1]
        ids = torch.where(recorded_rows(own), own.long(), logits.topk(k, dim=-1).indices)
        tokens = tokens.index_add(0, ids.flatten(), counted.expand(-1, k).flatten())
        share = share + (logits.float().softmax(-1) * counted).sum(0)
    return experts * (tokens / total * (share / total)).sum()
