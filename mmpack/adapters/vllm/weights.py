"""Are the engine's weights the trainer's? One checksum per tensor on both sides, under the trainer's names.

vLLM fuses projections (q, k and v into one tensor; gate and up into another) and, on a CPU, packs matrices into the
layout of its matrix product and frees them. The first are split again; the second are read back through the product
itself, which with the identity returns the matrix that the engine really multiplies by, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mmpack.errors import ModelError


def weight_checksums(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> dict[str, str]:
    """sha256 hex of each tensor's shape and values, by name; −0 counts as 0.

    Args: `tensors`: `model.state_dict().items()`, of 32 bits or fewer. `dtype`: cast to it first, as an engine of that
    dtype does.
    """
    return {name: _digest(tensor, dtype) for name, tensor in tensors}


def unlike_weights(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """Names whose checksums differ, or that only one side has, in the trainer's order.

    Example:
        >>> from mmpack.adapters.vllm import unlike_weights
        >>> unlike_weights({"a": "1f", "b": "2e"}, {"a": "1f", "b": "3d", "c": "4c"})
        ['b', 'c']
    """
    names = dict.fromkeys([*trainer, *engine])
    return [name for name in names if trainer.get(name) != engine.get(name)]


def engine_checksums(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """`weight_checksums` of what a vLLM model computes with, under the names of `shapes` (the trainer's).

    Raises: ModelError if a tensor has no place in the engine, or another size there (a tensor-parallel shard).
    """
    fused: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        place, rank = _place(model, name)
        fused.setdefault(place, []).append((rank, name))
    out = {}
    for place, members in fused.items():
        whole = _read(model, place)
        names = [name for _, name in sorted(members)]
        rows = [shapes[name][0] for name in names]
        if tuple(whole.shape) != (sum(rows), *shapes[names[0]][1:]):
            raise ModelError(
                f"engine_checksums: {place} has shape {list(whole.shape)}, expected "
                f"{sum(rows)} rows of {names[0]}. Fix: use an engine with tensor_parallel_size=1"
            )
        for name, part in zip(names, whole.split(rows), strict=True):
            out[name] = _digest(part)
    return {name: out[name] for name in shapes}


def _place(model: Any, name: str) -> tuple[str, int]:
    """The engine's name of a tensor, and its rank among those fused into it, by the model's own tables."""
    mapped = model.hf_to_vllm_mapper.map_name(name)
    for whole, parts in model.packed_modules_mapping.items():
        for rank, part in enumerate(parts):
            if f".{part}." in mapped and part != whole:
                return mapped.replace(f".{part}.", f".{whole}."), rank
    return mapped, 0


@torch.no_grad()
def _read(model: Any, place: str) -> torch.Tensor:
    owner, _, leaf = place.rpartition(".")
    try:
        module = model.get_submodule(owner)
        tensor: torch.Tensor = getattr(module, leaf).detach()
    except AttributeError:
        raise ModelError(
            f"engine_checksums: {place} is not in the engine. Fix: pass a model of the same architecture"
        ) from None
    if leaf != "weight" or not hasattr(module, "cpu_linear"):
        return tensor
    columns = tensor.shape[1] if tensor.ndim == 2 else module.input_size_per_partition
    identity = torch.eye(columns, dtype=tensor.dtype, device=tensor.device)
    product: torch.Tensor = module.quant_method.apply(module, identity, None)
    return product.T


def _digest(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    values = tensor.detach().to("cpu", dtype or tensor.dtype).float().contiguous() + 0.0
    digest = hashlib.sha256(f"{tuple(values.shape)}\0".encode())
    digest.update(values.numpy().data)
    return digest.hexdigest()
