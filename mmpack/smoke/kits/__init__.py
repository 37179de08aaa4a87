"""How each family is tried without a model hub: its tiny model, its offline processor, its drawn samples.

One file per family, named as the family is, that holds `KIT`; a file is found by its name.
"""

from __future__ import annotations

import importlib
import pkgutil

from mmpack.errors import check_name
from mmpack.families import FAMILIES
from mmpack.smoke.kits.base import Kit, Written

__all__ = ["Kit", "Written", "get_kit", "kit_names"]


def kit_names() -> list[str]:
    """Families that have a kit, in the order of `FAMILIES`."""
    files = {module.name for module in pkgutil.iter_modules(__path__)}
    return [name for name in FAMILIES if name in files]


def get_kit(family: str, what: str = "get_kit") -> Kit:
    """The kit of a family. Raises: ArgumentError, in the name of `what`, for a family that has none."""
    check_name(what, "family", family, kit_names())
    kit: Kit = importlib.import_module(f"{__name__}.{family}").KIT
    return kit
