"""RoPE that depends on a sample's length (rope types `dynamic` and `longrope`), for rows of many samples.

transformers takes one length for all rows of a forward, the largest position, and `dynamic` keeps the longest so far.
Here each sample's rows get what transformers gives that sample alone, in a model that has seen no other. Lengths go
through the model's forward as the keyword `rope_lengths`, int64 [1, T] or [B, S].
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ModelError
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.pack import pack
from mmpack.schema.sample import Sample

KEYWORD = "rope_lengths"


class RopeRule(NamedTuple):
    """A RoPE that depends on length: above `limit` positions."""

    kind: str  # the config's rope type
    limit: int
    field: str  # of the text model's config, that says the limit
    each: bool  # each length above the limit has frequencies of its own

    def counted(self, lengths: Tensor) -> Tensor:
        """Lengths, those with the same frequencies made equal."""
        return lengths.clamp(min=self.limit, max=None if self.each else self.limit + 1)


Rules = dict[str | None, RopeRule]


def rope_rules(core: Any) -> Rules:
    """The rules of the text model below `core`, by kind of layers (None: of all layers); mostly none."""
    return _rules(getattr(core.get_decoder(), "rotary_emb", None))


def _rules(rotary: Any) -> Rules:
    kinds = getattr(rotary, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    out: Rules = {}
    for layers, kind in kinds.items():
        if kind == "longrope":
            given, field = rotary.config.rope_parameters, "rope_parameters"
            if layers is not None:
                given, field = given[layers], f"{field}[{layers!r}]"
            name = "original_max_position_embeddings"
            out[layers] = RopeRule(kind, int(given[name]), f"{field}[{name!r}]", each=False)
        elif "dynamic" in (kind or ""):
            limit = int(rotary.original_max_seq_len)
            out[layers] = RopeRule(kind, limit, "max_position_embeddings", each=True)
    return out


def lengths_of(batch: Batch, rules: Rules, what: str) -> Tensor:
    """int64 [1, T] or [B, S]: the positions of each row's sample, 0 for padding.

    Raises ModelError, as `what`, for rows shared by samples that RoPE turns unlike.
    """
    low, high = _lengths(batch)
    for rule in rules.values():
        unlike = (rule.counted(low) != rule.counted(high)).flatten().nonzero()
        if len(unlike):
            short, long = (int(x.flatten()[unlike[0, 0]]) for x in (low, high))
            raise ModelError(
                f"{what}: samples of {short} and {long} positions share a prefix, and the text config's rope_type is "
                f"{rule.kind!r} and its {rule.field} is {rule.limit}, above which RoPE depends on the length. Fix: "
                "pack with share_prefix=False, or plan and pack the samples above that length by themselves"
            )
    return high


def _lengths(batch: Batch) -> tuple[Tensor, Tensor]:
    """The shortest and the longest sample of each row."""
    positions = batch.position_ids[-3:].amax(0)  # row 0 of four counts tokens, and turns nothing
    rows, device = batch.token_rows, positions.device
    counts = torch.tensor(batch.token_counts, device=device)
    of = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    lengths = counts.new_zeros(len(counts))
    lengths = lengths.scatter_reduce(0, of, positions.flatten()[rows] + 1, "amax")[of]
    both = [
        torch.zeros_like(positions)
        .flatten()
        .scatter_reduce(0, rows, lengths, how, include_self=False)
        for how in ("amin", "amax")
    ]
    shape = (1, -1) if positions.ndim == 1 else positions.shape
    return both[0].view(shape), both[1].view(shape)


def pack_shared(samples: Sequence[Sample], model: Any) -> PackedBatch:
    """`pack` with shared prefixes; without, where the model's RoPE turns samples unlike that share one."""
    batch = pack(samples, share_prefix=True)
    rules = rope_rules(unwrap(model, "pack").model)
    if rules:
        low, high = _lengths(batch)
        if any(not torch.equal(rule.counted(low), rule.counted(high)) for rule in rules.values()):
            return pack(samples)
    return batch


class RopeForward:
    """In the place of a rotary module's forward: each row by its sample's length where there are lengths, else its own.

    It stays. A pickled or copied module has one too.
    """

    def __init__(self, rotary: torch.nn.Module):
        self.rotary = rotary
        self.own = vars(rotary).get("forward")  # as accelerate's hooks set one
        self.lengths: Tensor | None = None  # of the forward that runs

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = args[0] if args else kwargs.get("layer_type")
        rule = _rules(self.rotary).get(layers)
        if self.lengths is None or rule is None:
            own = self.own or type(self.rotary).forward.__get__(self.rotary)
            return own(x, position_ids, *args, **kwargs)
        lengths = rule.counted(self.lengths).flatten().to(position_ids.device)
        flat, out = position_ids.flatten(-2), list[Tensor]()
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            # one more position, the last of a sample of this length, which transformers takes its length from
            last = flat.new_full((*flat.shape[:-1], 1), length - 1)
            places = torch.cat([flat[..., rows], last], dim=-1).unsqueeze(-2)
            parts = _fresh(self.rotary, layers).forward(x, places, *args, **kwargs)
            parts = [part.squeeze(-3)[..., :-1, :] for part in parts]  # cos and sin
            if not out:
                out = [p.new_empty(*p.shape[:-2], len(lengths), p.shape[-1]) for p in parts]
            for made, part in zip(out, parts, strict=True):
                made[..., rows, :] = part
        return tuple(made.unflatten(-2, position_ids.shape[-2:]) for made in out)


def _fresh(rotary: Any, layers: str | None) -> Any:
    """A copy with the frequencies that the module was made with; what its forward changes stays in the copy."""
    out, prefix = copy.copy(rotary), "" if layers is None else f"{layers}_"
    for name in [name for name in vars(out) if name.endswith("long_inv_freq")]:
        delattr(out, name)
    vars(out).pop("forward", None)
    vars(out).pop(f"{prefix}max_seq_len_cached", None)
    out.max_seq_len_cached = out.original_max_seq_len
    first = getattr(rotary, f"{prefix}original_inv_freq")
    out._buffers = dict(out._buffers) | {f"{prefix}inv_freq": first.clone()}
    return out


def take_lengths(core: Any) -> None:
    """Let the text model below `core` take `rope_lengths=`, if its RoPE depends on length."""
    decoder = core.get_decoder()
    if not rope_rules(core):
        return
    if not isinstance(vars(decoder.rotary_emb).get("forward"), RopeForward):
        decoder.rotary_emb.forward = RopeForward(decoder.rotary_emb)
    if _hand_over not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the text model's forward. Raises ModelError for rows of an attached model without their lengths."""
    lengths = kwargs.get(KEYWORD)
    if lengths is None and kwargs.get("visible_until") is not None:
        raise ModelError(
            "mmpack attention: rope_lengths is missing, and the model's RoPE depends on each sample's length. "
            "Fix: call model(**model_inputs(batch, model))"
        )
    decoder.rotary_emb.forward.lengths = lengths
    return args, {name: value for name, value in kwargs.items() if name != KEYWORD}
