"""Model families: one file per family, with all that is special about it."""

from __future__ import annotations

from mmpack.errors import LayoutError
from mmpack.families.base import Audio, Family
from mmpack.families.internvl import INTERNVL
from mmpack.families.qwen2_5_omni import QWEN2_5_OMNI
from mmpack.families.qwen2_5_vl import QWEN2_5_VL
from mmpack.families.qwen2_vl import QWEN2_VL
from mmpack.families.qwen3_5 import QWEN3_5
from mmpack.families.qwen3_5_moe import QWEN3_5_MOE
from mmpack.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from mmpack.families.qwen3_vl import QWEN3_VL
from mmpack.families.qwen3_vl_moe import QWEN3_VL_MOE

__all__ = ["FAMILIES", "Audio", "Family", "family_of_model_type", "get_family"]

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN3_5,
        QWEN3_5_MOE,
        INTERNVL,
        QWEN2_5_OMNI,
        QWEN3_OMNI_MOE,
    )
}


def get_family(name: str | Family) -> Family:
    """The family called `name`. Raises LayoutError (MM006) for a name that mmpack doesn't know."""
    if isinstance(name, Family):
        return name
    if not isinstance(name, str) or name not in FAMILIES:
        raise LayoutError(
            f"family {name!r} is unknown. Fix: use one of {', '.join(FAMILIES)}", "MM006"
        )
    return FAMILIES[name]


def family_of_model_type(model_type: str) -> Family:
    """The family of a transformers `config.model_type`. Raises LayoutError (MM006)."""
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = ", ".join(t for f in FAMILIES.values() for t in f.model_types)
    raise LayoutError(
        f"model_type {model_type!r} belongs to no family. Fix: use a model of type {known}", "MM006"
    )
