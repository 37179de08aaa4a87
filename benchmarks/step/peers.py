"""The rows of the step's benchmark: who runs the step, on what, and after which preparation of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.step.job import Job, Outcome
from benchmarks.step.packed import packed, removed_padding
from benchmarks.step.padded import liger, padded
from mmpack.adapters.transformers import attach, compile_layers

Bins = Callable[[Job], list[list[int]]]


_own = nullcontext  # the model as transformers makes it: sdpa, the tower's too
_tower = partial(attach, text=False)
_own_tower = partial(attach, tower="keep")


def _compiled(model: Any) -> Any:
    compile_layers(model)
    return attach(model)


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
    prepared: Callable[[Any], Any] = attach,
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
    "removed-padding": Peer("padding removed, as verl does", removed_padding, _half_packs, attach),
    "liger": Peer(
        "padded, varlen tower, Liger's GRPO loss", liger, prepared=_tower, package="liger-kernel"
    ),
    "plain-own-tower": _mmpack("mmpack, plain packs, the tower's own attention", False, _own_tower),
    "plain": _mmpack("mmpack, plain packs", False),
    "plain-compiled": _mmpack("mmpack, plain packs, compiled layers", False, _compiled),
    "shared-own-tower": _mmpack(
        "mmpack, shared prefixes, the tower's own attention", True, _own_tower
    ),
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
