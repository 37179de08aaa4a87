"""Deprecated names: they work until the version that they name, and say what replaces them.

docs/stability.md is the policy. A test refuses a release that still has what it said it would remove.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from mmpack.errors import DeprecatedWarning

P = ParamSpec("P")
T = TypeVar("T")


class Deprecation(NamedTuple):
    """What goes (`name`), with what in its place; `since` warns, `removed` is the first version without it."""

    name: str
    instead: str
    since: str
    removed: str

    def __str__(self) -> str:
        return f"{self.name} is deprecated since mmpack {self.since}, removed in {self.removed}. Fix: {self.instead}"


# All that were declared in modules that are loaded, for the test of a release.
DECLARED: list[Deprecation] = []


def deprecated(
    *, since: str, removed: str, instead: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: each call of the function warns, at the caller's line.

    Args: `since`, `removed`: versions, "0.3.0". `instead`: what to do, a verb first.

    Example:
        >>> from mmpack.deprecated import deprecated
        >>> @deprecated(since="0.2.0", removed="0.4.0", instead="call new()")
        ... def old():
        ...     return 1
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        name = f"{function.__module__}.{function.__qualname__}"
        said = Deprecation(name, instead, since, removed)
        DECLARED.append(said)

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(str(said), DeprecatedWarning, stacklevel=2)
            return function(*args, **kwargs)

        return wrapped

    return wrap
