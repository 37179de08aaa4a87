"""A function of a framework's object that mmpack stands in for, until it is given back."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mmpack.errors import ModelError


class Handle:
    """`owner`, whose method of this name is `function`. `stop` gives it back its own; so does leaving a `with` block.

    `stats`: those of the packed batches so far, added up: tokens, tokens_unshared, patches_encoded, ….
    Raises: ModelError for an owner that is used already.
    """

    def __init__(self, owner: Any, name: str, where: str):
        if isinstance(getattr(vars(owner).get(name), "__self__", None), Handle):
            raise ModelError(
                f"{where}: mmpack computes for it already. Fix: keep the first use, or call its stop() before"
            )
        self.owner, self.name = owner, name
        self.stats: Counter[str] = Counter()

    def start(self) -> None:
        setattr(self.owner, self.name, getattr(self, self.name))

    def stop(self) -> None:
        vars(self.owner).pop(self.name, None)

    def __enter__(self) -> Any:
        return self.owner

    def __exit__(self, *error: object) -> None:
        self.stop()
