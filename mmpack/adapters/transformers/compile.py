"""torch.compile of a VLM's layers, one by one: norms, rotary, activations and residuals become a few kernels a layer.

Layers of one kind share a graph, and packs of any length run on it. Only packed forwards of an attached model are
compiled: `generate`, padded batches with a mask and a detached model run as they did.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental import _config as shapes

from mmpack.adapters.transformers.layer_rules import LayerPlans
from mmpack.adapters.transformers.linear_attention import Segments, net_of
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.adapters.transformers.routes import take_routes
from mmpack.adapters.transformers.tower_attention import TowerPlans
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ModelError
from mmpack.ops.attention.choose import FLEX
from mmpack.ops.attention.operands import attended_dtype
from mmpack.ops.first_use import watch_inductor

CHECKPOINT = "_gradient_checkpointing_func"  # of a layer, as transformers calls it
TEXT_KEYWORD, TOWER_KEYWORD = "visible_until", "tower_plans"  # that layers of an attached model get
WATCHED = {TEXT_KEYWORD: "layers, and kernels", TOWER_KEYWORD: "the tower's blocks, and kernels"}
OPTIONS: dict[str, Any] = {"dynamic": True, "fullgraph": True}
# Dynamo, inductor, and what runs inductor's Triton kernels.
COMPILER = (
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.triton_heuristics",
)
# While layers are traced. Floats are constants: scales and epsilons as inputs of a graph would make torch trace and
# lower it twice. All layers' graphs count for one limit, which is 8 else. A layer's replayed experts go to its router
# by an attribute, which a checkpointed layer's graph sets once: what runs again is within the graph.
DYNAMO: dict[str, Any] = {
    "specialize_float": True,
    "recompile_limit": 64,
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
}
# Sizes that are equal in the first pack by chance, as its sequences and the rows of positions, stay two sizes.
SHAPES: dict[str, Any] = {"use_duck_shape": False}


def compile_layers(model: Any, *, tower: bool = True, **options: Any) -> None:
    """Compile each decoder layer of a transformers VLM (PEFT's and DDP's too) and, with `tower`, each vision block.

    The compiler is imported here, which takes seconds; what it compiles, it compiles in the first packed forward and
    backward: half a minute or so, and some seconds where torch's cache on disk has it, as layers are traced anew in
    each process. There is one graph for each of: plain packs, shared packs; with
    gradients, without; an input that needs gradients, one that does not (behind frozen embeddings); each kind of
    layer; each attention backend that packs choose, of which FlexAttention is none: `auto` leaves it out, and layers
    run eagerly where MMPACK_ATTENTION names it. Packs of other lengths, or of other numbers of samples, make no more.

    Of a layer with linear attention its norms and its MLP are compiled, a graph for each kind of them: the delta rule
    runs in waves, another number for each pack, and stays eager with the convolution and the projections around it.

    Call it after what changes the layers (LoRA, Liger); the order with `attach`, gradient checkpointing, DDP and
    `fully_shard` does not matter. Checkpointing needs `use_reentrant=False`.

    Args:
        tower: the blocks of the vision tower too. They are compiled where they run in one launch: not on a CPU, and
            not where `attach` kept the tower's attention.
        options: of torch.compile. By default dynamic=True, and fullgraph=True: `fullgraph=False` allows breaks.

    Raises: ModelError for what is no transformers model, and for layers that are compiled already.
    """
    whole = unwrap(model, "compile_layers")
    parts = {TEXT_KEYWORD: decoder_layers(whole)}
    if tower:
        parts[TOWER_KEYWORD] = tower_blocks(whole)
    layers = [layer for part in parts.values() for layer in part]
    if any(_is_compiled(layer) for layer in layers):
        raise ModelError(
            "compile_layers: the model's layers are compiled already. Fix: call it once"
        )
    load_compiler()
    take_routes(whole)  # graphs have the hooks of their first trace
    for keyword, part in parts.items():
        for layer in part:
            kind = CompiledForward if net_of(layer) is None else CompiledParts
            layer.forward = kind(layer, keyword, OPTIONS | options)


def load_compiler() -> None:
    """Import what torch imports when it first compiles: seconds, which a first step would pay for else."""
    for name in COMPILER:
        importlib.import_module(name)


class CompiledForward:
    """In the place of a layer's forward, inside of its hooks: compiled where the layer gets the keyword of packed rows.

    A pickled or copied layer has one too, which compiles for itself.
    """

    def __init__(self, layer: torch.nn.Module, keyword: str, options: dict[str, Any]):
        self.layer, self.keyword, self.options = layer, keyword, options
        self.own = vars(layer).get("forward")  # as accelerate's hooks set one
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._eager()(*args, **kwargs)
        if self.keyword == TOWER_KEYWORD:
            args, kwargs = _of_any_block(args, kwargs)
        if not self._is_one_graph(args, kwargs):
            return self._eager()(*args, **kwargs)
        if self.compiled is None:
            self.compiled = torch.compile(self._eager(), **self.options)
        with (
            torch._dynamo.config.patch(DYNAMO),  # type: ignore[attr-defined]
            shapes.patch(SHAPES),  # type: ignore[attr-defined]
            watch_inductor(WATCHED[self.keyword]),
        ):
            return self.compiled(*args, **kwargs)

    def _eager(self) -> Callable[..., Any]:
        """The class's forward as it is now: `fully_shard` makes a class of its own."""
        forward: Callable[..., Any] = self.own or type(self.layer).forward.__get__(self.layer)
        return forward

    def _is_one_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the layer gets packed rows, and an attention that torch traces for sequences of any lengths."""
        rule = kwargs.get(self.keyword)
        if rule is None:
            return False
        if self.keyword == TEXT_KEYWORD:
            plan = kwargs.get("attention_plan")
            plans = plan.plans if isinstance(plan, LayerPlans) else [plan] if plan else []
            return all(set(FLEX).isdisjoint((p.choice or {}).values()) for p in plans)
        dtype = attended_dtype(args[0] if args else kwargs["hidden_states"])
        chosen = {(plan.choice or {}).get(dtype, "sdpa") for plan in rule if plan is not None}
        return chosen.isdisjoint(("sdpa", *FLEX))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"compiled": None}


class CompiledParts(CompiledForward):
    """The same of a layer with linear attention: over packed rows it runs eagerly, and its norms and MLP compiled."""

    def __init__(self, layer: torch.nn.Module, keyword: str, options: dict[str, Any]):
        super().__init__(layer, keyword, options)
        self.packed = False  # while it runs over packed rows
        net = net_of(layer)
        for part in (*(child for child in layer.children() if child is not net), net.norm):
            part.forward = CompiledPart(part, keyword, options, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segments = isinstance(kwargs.get("attention_mask"), Segments)
        if not segments or kwargs.get(self.keyword) is None:
            return self._eager()(*args, **kwargs)
        held = vars(self.layer)
        checkpoint = held.get(CHECKPOINT)
        # since transformers 5.23 it calls the class's forward once more, past this one
        if checkpoint is not None:
            held[CHECKPOINT] = lambda run, *given, **more: checkpoint(
                functools.partial(self._over_packed, run), *given, **more
            )
        try:
            return self._over_packed(self._eager(), *args, **kwargs)
        finally:
            if checkpoint is not None:
                held[CHECKPOINT] = checkpoint

    def _over_packed(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.packed = True
        try:
            return run(*args, **kwargs)
        finally:
            self.packed = False


class CompiledPart(CompiledForward):
    """In the place of the forward of a module in such a layer."""

    def __init__(
        self, part: torch.nn.Module, keyword: str, options: dict[str, Any], whole: CompiledParts
    ):
        super().__init__(part, keyword, options)
        self.whole = whole

    def _is_one_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.whole.packed


def _of_any_block(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a vision block in the form that all blocks get, so that they share a graph.

    Its own plan alone, of windows or of whole pictures; no view, as the first block's rows are: graphs guard its base.
    """
    plans, lengths = kwargs.get(TOWER_KEYWORD), kwargs.get("cu_seqlens")
    plan = None if plans is None or lengths is None else plans.of(lengths)
    if plan is None:
        return args, kwargs
    rows = tuple(x.clone() if torch.is_tensor(x) and x._is_view() else x for x in args)
    return rows, kwargs | {TOWER_KEYWORD: TowerPlans(plan, None), "cu_seqlens": plan.cu_seqlens}


def has_compiled_text(whole: Any) -> bool:
    """Whether `compile_layers` compiled the text model."""
    return are_compiled(decoder_layers(whole))


def are_compiled(layers: Sequence[torch.nn.Module]) -> bool:
    """Whether `compile_layers` compiled these."""
    return any(_is_compiled(layer) for layer in layers[:1])


def _is_compiled(layer: torch.nn.Module) -> bool:
    return isinstance(vars(layer).get("forward"), CompiledForward) or bool(
        layer._compiled_call_impl
    )
