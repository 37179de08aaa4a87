"""Model families: one file per family, with all that is special about it."""

from __future__ import annotations

from typing import Any

from mmpack.errors import LayoutError
from mmpack.families.base import Audio, Family
from mmpack.families.gemma3 import GEMMA3
from mmpack.families.gemma4 import GEMMA4
from mmpack.families.glm4v import GLM4V
from mmpack.families.glm4v_moe import GLM4V_MOE
from mmpack.families.glm46v import GLM46V
from mmpack.families.internvl import INTERNVL
from mmpack.families.kimi_k25 import KIMI_K25
from mmpack.families.llava_onevision import LLAVA_ONEVISION
from mmpack.families.minicpmv4_6 import MINICPMV4_6
from mmpack.families.mistral3 import MISTRAL3
from mmpack.families.qwen2_5_omni import QWEN2_5_OMNI
from mmpack.families.qwen2_5_vl import QWEN2_5_VL
from mmpack.families.qwen2_vl import QWEN2_VL
from mmpack.families.qwen3_5 import QWEN3_5
from mmpack.families.qwen3_5_moe import QWEN3_5_MOE
from mmpack.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from mmpack.families.qwen3_vl import QWEN3_VL
from mmpack.families.qwen3_vl_moe import QWEN3_VL_MOE
from mmpack.families.smolvlm import SMOLVLM

__all__ = ["FAMILIES", "Audio", "Family", "family_of_config", "family_of_model_type", "get_family"]

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
        GEMMA3,
        GEMMA4,
        GLM4V,
        GLM4V_MOE,
        GLM46V,
        MISTRAL3,
        KIMI_K25,
        MINICPMV4_6,
        QWEN2_5_OMNI,
        QWEN3_OMNI_MOE,
        SMOLVLM,
        LLAVA_ONEVISION,
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


def family_of_config(config: Any) -> Family:
    """The family of a transformers config: by its model type and, where families share one, its image token.

    Raises LayoutError (MM006).
    """
    return family_of_model_type(config.model_type, getattr(config, "image_token_id", None))


def family_of_model_type(model_type: str, image_token_id: int | None = None) -> Family:
    """The family of a transformers `config.model_type`; of several, the first that has this image token.

    Raises LayoutError (MM006).
    """
    families = [f for f in FAMILIES.values() if model_type in f.model_types]
    for family in families:
        if image_token_id == family.image_token_id:
            return family
    if families:
        return families[0]
    known = ", ".join(dict.fromkeys(t for f in FAMILIES.values() for t in f.model_types))
    raise LayoutError(
        f"model_type {model_type!r} belongs to no family that mmpack knows. Fix: use a model of type {known}",
        "MM006",
    )
