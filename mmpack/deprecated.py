"""Deprecated names and arguments: they work until the version that they name, and say what replaces them.

docs/stability.md is the policy. A test refuses a release that still has what it said it would remove.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from mmpack.errors import ArgumentError, MmpackWarning

P = ParamSpec("P")
T = TypeVar("T")


class DeprecatedWarning(MmpackWarning, FutureWarning):
    """A name or an argument of mmpack goes in a later version. FutureWarning, since Python hides DeprecationWarning
    from all but the script itself.

    Example:
        >>> import warnings, mmpack as mp
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", mp.DeprecatedWarning)  # in your tests: learn of it early
    """


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
        said = _declare(f"{function.__module__}.{function.__qualname__}", instead, since, removed)

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(str(said), DeprecatedWarning, stacklevel=2)
            return function(*args, **kwargs)

        return wrapped

    return wrap


def renamed_argument(
    old: str, new: str, *, since: str, removed: str
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator: the function takes the keyword `old` for `new`, and warns at the caller's line.

    Raises, when it is called: ArgumentError where both are given.
    """

    def wrap(function: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(function)
        if new not in signature.parameters:
            raise ArgumentError(
                f"renamed_argument: {function.__qualname__} has no argument {new}. Fix: name an argument that it has"
            )
        where = f"{function.__module__}.{function.__qualname__}"
        said = _declare(f"{where}({old}=)", f"write {new}=", since, removed)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            if old in kwargs:
                if new in kwargs or new in signature.bind_partial(*args).arguments:
                    raise ArgumentError(
                        f"{where}: {old} and {new} are the same argument. Fix: pass {new} only"
                    )
                warnings.warn(str(said), DeprecatedWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapped

    return wrap


def _declare(name: str, instead: str, since: str, removed: str) -> Deprecation:
    out = Deprecation(name, instead, since, removed)
    DECLARED.append(out)
    return out
