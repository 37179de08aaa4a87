"""Tensors from rank to rank by a list of routes that all ranks know: one all-to-all, of any dtype as bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed


class Route(NamedTuple):
    """A tensor of `shape` that one rank of the group has and another needs."""

    source: int
    target: int
    shape: tuple[int, ...]


def exchange(
    routes: Sequence[Route],
    own: Mapping[int, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    group: Any = None,
) -> dict[int, Tensor]:
    """What the routes bring to this rank, by their numbers. A route that ends where it begins costs nothing.

    Args: `routes`: the same on all ranks. `own`: the tensors of those that begin here. `dtype`: of all of them.
    Every rank of the group takes part, unless no route leaves its rank.
    """
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    here = {n: own[n] for n, r in enumerate(routes) if r.source == r.target == rank}
    if all(r.source == r.target for r in routes):
        return here
    width = torch.empty(0, dtype=dtype).element_size()
    leaving = [
        [n for n, r in enumerate(routes) if (r.source, r.target) == (rank, t)] for t in range(ranks)
    ]
    coming = [
        [n for n, r in enumerate(routes) if (r.source, r.target) == (s, rank)] for s in range(ranks)
    ]
    leaving[rank] = coming[rank] = []
    sizes = [width * math.prod(r.shape) for r in routes]
    numbers = [n for to in leaving for n in to]
    flat = [own[n].detach().to(device, dtype).reshape(-1) for n in numbers]
    sent = torch.cat([torch.empty(0, dtype=dtype, device=device), *flat]).view(torch.uint8)
    bytes_in = [sum(sizes[n] for n in some) for some in coming]
    got = torch.empty(sum(bytes_in), dtype=torch.uint8, device=device)
    distributed.all_to_all_single(
        got, sent, bytes_in, [sum(sizes[n] for n in to) for to in leaving], group=group
    )
    arrived = [n for some in coming for n in some]
    parts = got.split([sizes[n] for n in arrived])
    return here | {
        n: part.view(dtype).view(routes[n].shape) for n, part in zip(arrived, parts, strict=True)
    }
