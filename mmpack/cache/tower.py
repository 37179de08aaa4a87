"""The modules that turn pixels into features, and all else that features depend on.

That is the weights (found by their values, so that no way to change them goes unseen), settings of the modules
(adapters switched on or off, their scales), and how torch runs them now (autocast, precision, device).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from mmpack.errors import ModelError
from mmpack.ops.invariance import is_on
from mmpack.ops.tf32 import float32_products

# of one medium: [tokens, H] of the embeddings, then of each deepstack level
Levels = tuple[Tensor, ...]
Digest = tuple[int, ...]

STRIDE = 4093
_WORDS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int32,
}  # a lone sign bit of 64 would cancel another
# whose hooks change no feature; transformers sets some anew each time that it switches checkpointing on
_HARMLESS = ("mmpack.", "transformers.")
# what every module has (hooks, training), and what changes how a backward is run, but no feature
_IGNORED = {*vars(torch.nn.Module()), "gradient_checkpointing", "_is_hf_initialized"}


@dataclass(frozen=True, eq=False)
class Tower:
    """`modules`: those between pixels and features. `about`: what else features depend on, as the caller knows it."""

    modules: tuple[torch.nn.Module, ...]
    about: Hashable = ()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        for module in self.modules:
            yield from module.parameters()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def trains(self) -> bool:
        """Return whether features made now would carry gradients to the weights."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def zero(self) -> Tensor:
        """0, with a gradient of 0 to every weight that is trained: DistributedDataParallel waits for one of each."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return 0 * torch.stack([p.reshape(-1)[0].float() for p in trained]).sum()

    def how(self) -> Hashable:
        """Return what else decides the features that equal weights would make now."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        named = [named for module in self.modules for named in module.named_modules()]
        # not Python's hash, by which -1 and -2 are the same
        settings = repr([(n, type(m).__qualname__, _plain_of(m)) for n, m in named])
        return (
            self.device,
            autocast,
            float32_products(),
            is_on(),  # whose features are other bits
            torch.are_deterministic_algorithms_enabled(),
            sha256(settings.encode()).hexdigest(),
            tuple(f for _, m in named for f in _functions_of(m)),
            self.about,
        )

    def digest(self) -> Digest:
        """Shapes, dtypes and values of all parameters and buffers, as a few numbers. Waits for the device.

        Values are read, because no counter of torch's sees `p.data.copy_(…)`: their bits as integers, every 4,093rd
        word added up, are multiplied by pseudo-random odd numbers of their places and added modulo 2^64.
        """
        tensors = self._tensors()
        sums: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                sums.setdefault(tensor.device, []).extend(_bits(tensor))
        layout = hash(tuple((tuple(t.shape), t.dtype) for t in tensors))
        return layout, *(_mixed(torch.cat(own)) for own in sums.values())

    def equals(self, other: Tower) -> bool:
        """Return whether all parameters and buffers have the same values, on any devices."""
        own, theirs = self._tensors(), other._tensors()
        return len(own) == len(theirs) and all(
            a.dtype == b.dtype and torch.equal(a, b.to(a.device))
            for a, b in zip(own, theirs, strict=True)
        )

    @property
    def random(self) -> str | None:
        """The module that makes two forwards of the same pixels differ: dropout, or a norm over the batch at hand."""
        for module in self.modules:
            for name, m in module.named_modules():
                if m.training and (isinstance(m, _NormBase) or _drops(m)):
                    return name or type(m).__name__
        return None

    def refuse_random(self, what: str) -> None:
        """Raise ModelError where two forwards of the same pixels differ."""
        name = self.random
        if name is not None:
            raise ModelError(
                f"{what}: {name} of the tower is in training mode and random or batch-dependent (dropout), so "
                "features can't be reused. Fix: set dropout to 0, or call tower.eval()"
            )

    def _tensors(self) -> list[Tensor]:
        return [
            t.detach()
            for module in self.modules
            for own in (module.parameters(), module.buffers(), _unregistered(module))
            for t in own
        ]


def _bits(tensor: Tensor) -> list[Tensor]:
    """int64: the bits of values as words of eight bytes, every `STRIDE`th added up; and the rest, value by value.

    No width of a layer is a multiple of the stride, a prime: rows and columns that change places change the sums.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.contiguous().view(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    words = torch.int64 if size < 8 else torch.int32
    whole = len(flat) - len(flat) % (8 // size * STRIDE)
    sums = flat[:whole].view(words).view(-1, STRIDE).sum(0, dtype=torch.int64)
    return [sums, flat[whole:].view(_WORDS[size]).long()]


def _mixed(sums: Tensor) -> int:
    place = torch.arange(1, len(sums) + 1, device=sums.device)
    place = place * -0x61C8864680B583EB  # 2^64 / golden ratio, as splitmix64 takes it
    place = (place ^ (place >> 30)) * -0x40A7B892E31B1A47
    return int((sums * (place ^ (place >> 27) | 1)).sum())


def _drops(module: torch.nn.Module) -> bool:
    names = ["p"] if isinstance(module, _DropoutNd) else [n for n in vars(module) if "drop" in n]
    values = [vars(module)[name] for name in names]
    return any(isinstance(v, float | int) and v > 0 for v in values)


def _plain_of(module: torch.nn.Module) -> Hashable:
    """Attributes that are numbers, names, and lists and dicts of them."""
    own = vars(module).items()
    return tuple((n, _plain(v)) for n, v in own if n not in _IGNORED and _is_plain(v))


def _functions_of(module: torch.nn.Module) -> list[Any]:
    """Hooks, and what was set in the place of its forward."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    foreign = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith(_HARMLESS)]
    return foreign + ([vars(module)["forward"]] if "forward" in vars(module) else [])


def _unregistered(module: torch.nn.Module) -> Iterator[Tensor]:
    """Tensors that are plain attributes."""
    for m in module.modules():
        yield from (value for value in vars(m).values() if torch.is_tensor(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in [*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool | torch.dtype)


def _plain(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((k, _plain(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return tuple(sorted(map(repr, value))) if isinstance(value, set | frozenset) else value
