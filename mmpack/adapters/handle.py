"""Attributes of a framework's objects that mmpack stands in for, until they are given back."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

from mmpack.errors import ModelError


class Replaced(ExitStack):
    """Objects' attributes, replaced by `put`. `stop` gives them back; so does leaving a `with` block."""

    stop = ExitStack.close

    def put(self, owner: Any, name: str, new: Any) -> None:
        own = vars(owner)
        if name in own:
            self.callback(setattr, owner, name, own[name])
        else:  # of its class
            self.callback(delattr, owner, name)
        setattr(owner, name, new)


class Handle(Replaced):
    """`owner`, whose methods of these names are those of the handle from `start` on.

    `stats`: those of the packed batches so far, added up: tokens, tokens_unshared, patches_encoded, ….
    Raises: ModelError for an owner that is used already.
    """

    def __init__(self, owner: Any, where: str, *names: str):
        super().__init__()
        if isinstance(getattr(vars(owner).get(names[0]), "__self__", None), Handle):
            raise ModelError(
                f"{where}: mmpack computes for it already. Fix: keep the first use, or call its stop() before"
            )
        self.owner, self.names = owner, names
        self.stats: Counter[str] = Counter()

    def start(self) -> None:
        for name in self.names:
            self.put(self.owner, name, getattr(self, name))

    def __enter__(self) -> Any:
        return self.owner
