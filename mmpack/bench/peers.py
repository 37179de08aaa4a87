"""The rows of the step's benchmark: who runs the step, on what, and after which preparation of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmpack.adapters.transformers import attach
from mmpack.bench.job import Job, Outcome
from mmpack.bench.packed import packed, removed_padding
from mmpack.bench.padded import liger, padded

Bins = Callable[[Job], list[list[int]]]


@contextmanager
def _own(model: Any) -> Iterator[None]:
    """The model as transformers makes it: sdpa, the tower's too."""
    yield


@contextmanager
def _tower(model: Any) -> Iterator[None]:
    with attach(model, text=False):
        yield


@contextmanager
def _attached(model: Any) -> Iterator[None]:
    with attach(model):
        yield


@contextmanager
def _kept_tower(model: Any) -> Iterator[None]:
    with attach(model, tower="keep"):
        yield


@contextmanager
def _compiled(model: Any) -> Iterator[None]:
    from mmpack.adapters.transformers.compile import compile_layers

    with attach(model):
        compile_layers(model)
        yield


def _groups(job: Job) -> list[list[int]]:
    return job.own_groups()


def _packs(job: Job, share_prefix: bool = False) -> list[list[int]]:
    return job.bins(share_prefix, job.max_rows)


def _half_packs(job: Job) -> list[list[int]]:
    """Logits of all rows take the memory."""
    return job.bins(False, job.max_rows // 2)


@dataclass(frozen=True)
class Peer:
    """One row: `forward` of a micro-batch, the `bins` of a rank, and `prepared`, a context of the model.

    `head_again`: the backward makes the logits again. `encodes_each`: a medium once per sample of a micro-batch.
    """

    about: str
    forward: Callable[[Any, Job, list[int]], Outcome]
    bins: Bins = _groups
    prepared: Callable[[Any], Any] = _own
    head_again: bool = False
    encodes_each: bool = True
    package: str | None = None


def _mmpack(
    about: str,
    share_prefix: bool,
    prepared: Callable[[Any], Any] = _attached,
    keep: bool = False,
) -> Peer:
    return Peer(
        about,
        partial(packed, share_prefix=share_prefix, keep=keep),
        partial(_packs, share_prefix=share_prefix),
        prepared,
        head_again=True,
        encodes_each=False,
    )


REFERENCE = "padded"
PEERS = {
    REFERENCE: Peer("padded, as TRL calls the model", padded),
    "padded-tower": Peer("padded, varlen tower", padded, prepared=_tower),
    "padded-tower-no-mask": Peer(
        "padded, varlen tower, no mask", partial(padded, mask=False), prepared=_tower
    ),
    "removed-padding": Peer(
        "padding removed, as verl does", removed_padding, _half_packs, _attached
    ),
    "liger": Peer(
        "padded, varlen tower, Liger's GRPO loss", liger, prepared=_tower, package="liger-kernel"
    ),
    "plain-keep": _mmpack("mmpack, plain packs, the tower's own attention", False, _kept_tower),
    "plain": _mmpack("mmpack, plain packs", False),
    "plain-compiled": _mmpack("mmpack, plain packs, compiled layers", False, _compiled),
    "shared-keep": _mmpack("mmpack, shared prefixes, the tower's own attention", True, _kept_tower),
    "shared": _mmpack("mmpack, shared prefixes", True),
    "shared-compiled": _mmpack("mmpack, shared prefixes, compiled layers", True, _compiled),
    "shared-kept": _mmpack(
        "mmpack, shared prefixes, activations kept where memory is left", True, keep=True
    ),
    "shared-compiled-kept": _mmpack(
        "mmpack, shared prefixes, compiled layers, activations kept where memory is left",
        True,
        _compiled,
        keep=True,
    ),
}
