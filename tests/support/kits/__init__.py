"""How each family is tried without a model hub: its tiny model, its offline processor, its drawn samples.

One file per family, named as the family is, that holds `KIT`; a file is found by its name. Families of one's own hand
theirs to `register_kit`.
"""

from __future__ import annotations

import importlib
import pkgutil

from support.kits.base import Kit, Written

from mmpack.errors import ArgumentError, check_name
from mmpack.families import FAMILIES

__all__ = ["Kit", "Written", "get_kit", "kit_names", "register_kit"]
_REGISTERED: dict[str, Kit] = {}


def kit_names() -> list[str]:
    """Families that have a kit, in the order of `FAMILIES`."""
    files = {module.name for module in pkgutil.iter_modules(__path__)}
    return [name for name in FAMILIES if name in files or name in _REGISTERED]


def register_kit(kit: Kit) -> Kit:
    """Make a kit known by its family, in this process; returns it.

    Raises: LayoutError (MM006) for a family that is not registered; ArgumentError for one that has a kit.
    """
    name = kit.about.name
    if _REGISTERED.get(name) is not kit and name in kit_names():
        raise ArgumentError(
            f"register_kit: {name} has a kit already. Fix: register this one for a family of its own"
        )
    _REGISTERED[name] = kit
    return kit


def get_kit(family: str, what: str = "get_kit") -> Kit:
    """The kit of a family. Raises: ArgumentError, in the name of `what`, for a family that has none."""
    check_name(what, "family", family, kit_names())
    if family in _REGISTERED:
        return _REGISTERED[family]
    kit: Kit = importlib.import_module(f"{__name__}.{family}").KIT
    return kit
