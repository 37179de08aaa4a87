"""Parts of a model of Megatron's: its language model, the VLM around it, its groups; and what can't obey a pack."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from mmpack.errors import ModelError

# (option, what it would do where it is on)
_OPTIONS = (
    ("multi_latent_attention", "compresses keys and values"),
    ("window_size", "slides a window over rows, which are not one sequence"),
    ("attention_dropout", "drops other weights in a pack than in separate samples"),
    ("fp8_dot_product_attention", "runs attention in FP8 by Transformer Engine"),
    ("qk_clip", "reads the logits of Megatron's own attention"),
    ("log_max_attention_logit", "reads the logits of Megatron's own attention"),
    ("mtp_num_layers", "predicts from the row below, which may be of another sample"),
    ("overlap_moe_expert_parallel_comm", "runs layers by a schedule without the model's forward"),
    ("use_mup", "scales logits behind the head"),
    ("moe_expert_capacity_factor", "drops rows by how many others there are"),
    ("moe_z_loss_coeff", "counts a shared row once"),
    ("moe_input_jitter_eps", "draws one number for a shared row"),
    ("defer_embedding_wgrad_compute", "keeps the head's inputs in a buffer of Megatron's own"),
)


def unwrap(model: Any, what: str) -> tuple[Any, GPTModel]:
    """The model below DDP, Float16Module and the like, and the GPTModel in it: itself, or a VLM's.

    Raises: ModelError for another model.
    """
    whole = model
    while not isinstance(whole, GPTModel) and hasattr(whole, "module"):
        whole = whole.module
    language = whole if isinstance(whole, GPTModel) else getattr(whole, "language_model", None)
    if not isinstance(language, GPTModel):
        raise ModelError(
            f"{what}: {type(whole).__name__} is no GPTModel of Megatron-Core's, and has none as its language_model. "
            "Fix: pass one chunk of what get_model returned; a HybridModel can't be packed"
        )
    return whole, language


def refuse_first(what: str, *checks: tuple[bool, str, str]) -> None:
    """Raise ModelError for the first of (is bad, why, fix) that is."""
    for bad, why, fix in checks:
        if bad:
            raise ModelError(f"{what}: {why}. Fix: {fix}")


@contextlib.contextmanager
def other_forward(module: Any, forward: Any) -> Iterator[None]:
    """Another forward of a module within the block."""
    had = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if had is not None:
            module.forward = had


def pad_multiple(model: Any) -> int:
    """`pad_to_multiple_of` for packs of this model: what context and sequence parallelism, FP8 and FP4 ask of rows."""
    language = unwrap(model, "pad_multiple")[1]
    config, groups = language.config, language.pg_collection
    aligned = 32 if config.fp4 or config.fp8_recipe == "mxfp8" else 16
    own = aligned if config.fp8 or config.fp4 else 1
    shared = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    return int(shared * own)


def cores(block: Any) -> list[Any]:
    """The core attention of each layer of a TransformerBlock. Raises: ModelError for a layer without one."""
    out = []
    for layer in block.layers:
        core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        if core is None:
            kind = type(getattr(layer, "self_attention", layer)).__name__
            raise ModelError(
                f"attach: layer {layer.layer_number} has {kind}, without a core attention that mmpack could replace. "
                "Fix: train on samples of their own (THD), or use a model of softmax attention"
            )
        out.append(core)
    return out


def refuse_unpackable(language: GPTModel) -> None:
    """Raise ModelError for options under which a pack differs from its samples."""
    config = language.config
    for name, why in _OPTIONS:
        value = getattr(config, name, None)
        refuse_first("attach", (bool(value), f"{name} is {value}, and {why}", "leave it out"))
    kinds, scales = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(kinds, scales, strict=True) if isinstance(kinds, list) else [(kinds, scales)]
    odd = [k for k, c in pairs if k == "sinkhorn" or (c and k not in ("aux_loss", "none"))]
    graphs, softmax = getattr(config, "cuda_graph_impl", "none"), config.softmax_type
    head = type(getattr(language, "output_layer", None))
    apart = language.post_process and head is not ColumnParallelLinear
    refuse_first(
        "attach",
        (softmax != "vanilla", f"softmax_type is {softmax!r}, which has sinks", "use 'vanilla'"),
        (
            graphs != "none",
            f"cuda_graph_impl is {graphs!r}, and packs differ in rows",
            "use 'none'",
        ),
        (bool(odd), f"moe_router_load_balancing_type is {odd}", "use 'aux_loss' or 'none'"),
        (apart, f"the head is {head.__name__}", "leave Megatron's ColumnParallelLinear there"),
    )
