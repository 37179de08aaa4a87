"""Heads for rows around what needs all rows: softmax attention, and gated delta nets.

A rank brings its rows of all heads and gets all rows of its heads. Heads that groups of others share (keys and values,
a net's queries and keys) are repeated where the ranks don't divide them: as few times as will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpack.adapters.transformers.ulysses.split import RowSplit, to_heads, to_rows
from mmpack.errors import ModelError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_by_heads(
    split: RowSplit, query: Tensor, key: Tensor, value: Tensor, attend: Attend
) -> Tensor:
    """`attend` over all rows, of this rank's heads: query [1, heads, t, d], key and value [1, kv heads, t, d] -> [1, t,
    heads, d] of own rows.

    Args: `attend`: the same of T rows and heads / P -> [1, T, heads / P, d].
    Raises: ModelError for rows that are not this rank's, and heads that the ranks don't divide.
    """
    own = split.counts[split.rank]
    if query.shape[0] != 1 or query.shape[2] != own or key.shape[2] != own:
        raise ModelError(
            f"mmpack attention: {query.shape[0]} × {query.shape[2]} queries and {key.shape[2]} keys arrived, "
            "but this rank "
            f"of sequence_group has {own} rows. Fix: call model(**model_inputs(batch, model, sequence_group=group))"
        )
    heads, kv = query.shape[1], key.shape[1]
    times = repeats(kv, heads, split.ranks)
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    parts = [x[0].transpose(0, 1) for x in (query, key, value)]
    got = _exchange(split, parts)
    out = attend(*(x.transpose(0, 1)[None] for x in got))
    back = to_rows(out[0].flatten(1), split.counts, split.group)
    return back.view(1, own, heads, -1)


class OwnHeads(NamedTuple):
    """What a rank has of a gated delta net's heads; int64, on the CPU."""

    channels: Tensor  # of its convolution: those of queries, keys and values
    values: Tensor  # value heads


def net_by_heads(
    split: RowSplit,
    net: Any,
    states: Callable[[Tensor, Tensor, Tensor, OwnHeads], Tensor],
    mixed: Tensor,
    decay: Tensor,
    write: Tensor,
) -> Tensor:
    """A gated delta net between its products, over all rows, of this rank's heads -> [t, value heads, d] of own rows.

    Args: `states`: the same of T rows and a rank's heads -> [T, its value heads, d]. `mixed` [t, queries, keys and
    values], `decay` and `write` [t, value heads], as the products made them.
    """
    widths = [net.key_dim, net.key_dim, net.value_dim]
    sizes = [net.head_k_dim, net.head_k_dim, net.head_v_dim]
    query, key, value = (
        x.unflatten(1, (-1, size)) for x, size in zip(mixed.split(widths, 1), sizes, strict=True)
    )
    times = repeats(key.shape[1], value.shape[1], split.ranks)
    query, key = (x.repeat_interleave(times, dim=1) for x in (query, key))
    keys = _own_heads(net.key_dim // net.head_k_dim, times, split)
    values = _own_heads(net.value_dim // net.head_v_dim, 1, split)
    by_key, by_value = _channels(keys, net.head_k_dim), _channels(values, net.head_v_dim)
    channels = torch.cat([by_key, net.key_dim + by_key, 2 * net.key_dim + by_value])
    *three, decay, write = _exchange(split, [query, key, value, decay[..., None], write[..., None]])
    mixed = torch.cat([x.flatten(1) for x in three], dim=1)
    out = states(mixed, decay[..., 0], write[..., 0], OwnHeads(channels, values))
    back = to_rows(out.flatten(1), split.counts, split.group)
    return back.reshape(back.shape[0], -1, net.head_v_dim)


def repeats(shared: int, heads: int, ranks: int) -> int:
    """How often each of `shared` heads is repeated, so that the ranks divide them; `heads` is a multiple of them."""
    group = heads // shared
    for times in range(1, group + 1):
        if group % times == 0 and shared * times % ranks == 0:
            return times
    raise ModelError(
        f"mmpack attention: a layer has {heads} heads, which {ranks} ranks of sequence_group don't divide. "
        "Fix: use a group of fewer ranks"
    )


def _exchange(split: RowSplit, parts: Sequence[Tensor]) -> list[Tensor]:
    """Each [t, heads, d] -> [T, heads / P, d], all in one collective."""
    cut = [x.reshape(len(x), split.ranks, -1) for x in parts]
    widths = [x.shape[2] for x in cut]
    got = to_heads(torch.cat(cut, dim=2), split.counts, split.group).split(widths, dim=1)
    # torch.cat takes the widest dtype, from where all numbers come back as they were
    return [
        x.unflatten(1, (-1, part.shape[2])).to(part.dtype)
        for x, part in zip(got, parts, strict=True)
    ]


def _own_heads(count: int, times: int, split: RowSplit) -> Tensor:
    """This rank's of `count` heads, each repeated `times`."""
    return torch.arange(count).repeat_interleave(times).chunk(split.ranks)[split.rank]


def _channels(heads: Tensor, width: int) -> Tensor:
    return (heads[:, None] * width + torch.arange(width)).flatten()
