"""Every error and warning that mmpack raises on purpose, and the checks of arguments and packages that raise them.

A message says what, where, why and how to fix it, in one line. Commands turn each of these into one line on stderr
and exit code 2 (`SchemaError`, a broken rule, into 1 where the design says so).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from numbers import Integral, Rational, Real
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmpack.schema.rules import Problem

_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\w*\[)", re.MULTILINE)


class MmpackError(Exception):
    """Base of all errors below."""


class ArgumentError(MmpackError, ValueError):
    """An argument has the wrong shape, type or value."""


class TraceError(MmpackError, ValueError):
    """A file is not a trace, or a record in it has the wrong structure.

    Where it breaks a rule: its `code`, the place and what is wrong there.
    """

    def __init__(self, message: str, code: str | None = None, where: str = "", why: str = ""):
        self.code, self.where, self.why = code, where, why
        super().__init__(message)


class SchemaError(MmpackError, ValueError):
    """Samples break rules of the schema. `problems` holds all of them."""

    def __init__(self, problems: list[Problem], what: str = "check"):
        self.problems = problems
        shown = "; ".join(str(p) for p in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        super().__init__(f"{what}: {shown}{more}")


class LayoutError(MmpackError, ValueError):
    """Token ids, grids and spans of one sample contradict each other. `code` is a rule of `mmpack.schema.rules`."""

    def __init__(self, message: str, code: str, span: tuple[int, int] | None = None):
        self.code = code
        self.span = span
        super().__init__(f"{message} ({code})")


class VideoError(MmpackError, ValueError):
    """A file is no video, is broken, holds no frames, or is larger than the limits."""


class AudioError(MmpackError, ValueError):
    """A file is no sound, is broken, holds no samples, or is larger than the limits."""


class PlanError(MmpackError, ValueError):
    """A sample that fits into no bin, or budgets that contradict each other."""


class ModelError(MmpackError, RuntimeError):
    """A model cannot obey the layout it is given (wrong attention, a KV cache left on, an unsupported family)."""


class BackendError(MmpackError, RuntimeError):
    """A backend was asked for by name and can't run here."""


class BlobError(MmpackError, RuntimeError):
    """A medium can't be kept in a store of pixels, or not be had from it. `code` is a rule of `mmpack.schema.rules`."""

    def __init__(self, message: str, code: str):
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)


class MissingExtraError(MmpackError, ImportError):
    """An optional package is not installed."""


class MmpackWarning(UserWarning):
    """Base of all warnings below: work goes on, and does not do what it seems to.

    Example:
        >>> import warnings, mmpack as mp
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", mp.MmpackWarning)  # a warning ends the run
    """


class DeprecatedWarning(MmpackWarning, FutureWarning):
    """A name or an argument of mmpack goes in a later version. FutureWarning, since Python hides DeprecationWarning
    from all but the script itself.

    Example:
        >>> import warnings, mmpack as mp
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", mp.errors.DeprecatedWarning)  # in your tests: learn of it early
    """


class GroupWarning(MmpackWarning):
    """Each sample is alone in its group: its advantage is 0, and nothing is learned."""


class LossWarning(MmpackWarning):
    """Something handed in does not reach the loss: ids without loss spans, logprobs that no correction reads."""


class TemplateWarning(MmpackWarning):
    """The chat template writes a message not as it was given: it leaves out thoughts of earlier turns, or adds tags."""


class UnwrittenWarning(MmpackWarning, RuntimeWarning):
    """A file can't be written (a full disk, no rights): what it would have kept is made again, or waits in memory."""


__all__ = [
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, MmpackError | MmpackWarning)
]


def callers_level() -> int:
    """`stacklevel` of a warning that the caller of this function raises: the first line outside of mmpack."""
    frame, level = sys._getframe(1), 1
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "mmpack"
    ):
        frame, level = frame.f_back, level + 1
    return level


@contextmanager
def needs(extra: str, purpose: str) -> Iterator[None]:
    """Imports in this block: a package that is missing raises MissingExtraError, which names the extra to install.

    Args: `extra`: the extra of mmpack's wheel that installs it. `purpose`: what needs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package, _, inside = (error.name or "").partition(".")
        if package in ("", "mmpack"):
            raise
        missing = f"{purpose} needs the package {package!r}, which is not installed"
        if inside and importlib.util.find_spec(package) is not None:
            missing = f"{purpose} needs {error.name!r}, which the {package} that is installed lacks"
        raise MissingExtraError(f"{missing}. Fix: pip install 'mmpack[{extra}]'") from None


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional module (a dotted name) under `needs`."""
    with needs(extra, purpose):
        return importlib.import_module(module)


def installed_version(package: str) -> str | None:
    """The version of a package by its name in the package index, without importing it; None if not installed."""
    from importlib import metadata  # slow, and most runs don't ask

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_number(
    what: str,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    finite: bool = True,
    fix: str = "pass such a number",
) -> None:
    """Raise ArgumentError unless `value` is a number of the host in the range; NaN is in none.

    Args: `what`: the function. `name`: its option. `finite`: infinities are refused too. `least` or `above` is given
    where they are not.
    """
    # torch takes no Fraction
    number = isinstance(value, (float, int, Integral)) or (
        isinstance(value, Real) and not isinstance(value, Rational)
    )
    huge = isinstance(value, int) and abs(value) > sys.float_info.max
    fits = (
        number
        and not huge
        and (not finite or -math.inf < value < math.inf)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
    if fits:
        return
    shown = "too large for a float" if huge else repr(value) if number else kind_of(value)
    words = ["a finite number" if finite else "a number"]
    words += [f"above {above:g}"] if above is not None else []
    words += [f"of {least:g} or more"] if least is not None else []
    words += [f"up to {most:g}"] if most is not None else []
    raise ArgumentError(f"{what}: {name} is {shown}, expected {' '.join(words)}. Fix: {fix}")


def check_whole(
    what: str, name: str, value: Any, *, least: int = 1, fix: str = "pass such a number"
) -> None:
    """Raise ArgumentError unless `value` is a whole number of `least` or more."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        return
    shown = repr(value) if isinstance(value, Real) else kind_of(value)
    raise ArgumentError(
        f"{what}: {name} is {shown}, expected a whole number of {least} or more. Fix: {fix}"
    )


def check_flag(what: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless `value` is a bool (numpy's too), or a number in its place."""
    if isinstance(value, Real) or type(value).__name__ in ("bool", "bool_"):
        return
    raise ArgumentError(
        f"{what}: {name} is {kind_of(value)}, expected a bool. Fix: pass True or False"
    )


def check_name(what: str, option: str, value: Any, names: Collection[str]) -> None:
    """Raise ArgumentError unless `value` is one of `names`."""
    if isinstance(value, str) and value in names:
        return
    shown = repr(value) if isinstance(value, str) else kind_of(value)
    raise ArgumentError(f"{what}: {option} is {shown}. Fix: use one of {', '.join(names)}")


def kind_of(value: Any) -> str:
    """Return what a value is, in the words of an error: `None`, `a list`, `a numpy array`."""
    if value is None:
        return "None"
    module, name = type(value).__module__.split(".")[0], type(value).__name__
    return "a numpy array" if (module, name) == ("numpy", "ndarray") else f"of type {name}"


def no_command(text: str) -> str:
    """`text` in which no line is a command to a runner of CI: GitHub's `::name::` and `##[name]`, Azure's `##vso[…]`.

    Example:
        >>> from mmpack.errors import no_command
        >>> no_command("  ::error::no, ##[group]no, a::b")
        '  \\\\x3a:error::no, \\\\x23#[group]no, a::b'
    """
    return _COMMAND.sub(lambda m: "\\x23" if m[1] is None else f"{m[1]}\\x3a", text)


def one_line(text: str) -> str:
    """`text` with every control or unprintable character escaped.

    Example:
        >>> from mmpack.errors import one_line
        >>> one_line("two\\nlines")
        'two\\\\nlines'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
