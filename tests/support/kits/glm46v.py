"""GLM-4.6V as the dense checkpoint has it (GLM-4.6V-Flash): GLM-4.1V's model, the newer ids."""

from functools import partial

from support.kits.base import Kit
from support.kits.glm4v import GLM_TOWER, NARROW_GLM, TEXT_CONFIG, processor, written
from support.kits.parts import whole

from mmpack.families import get_family

_IDS = get_family("glm46v")
KIT = Kit(
    family="glm46v",
    heavy=True,
    model_class="Glm4vForConditionalGeneration",
    config_class="Glm4vConfig",
    config=whole(
        TEXT_CONFIG,
        GLM_TOWER,
        image_token_id=_IDS.image_token_id,
        video_token_id=_IDS.video_prompt_id,
    ),
    narrow=NARROW_GLM,
    processor=partial(processor, "glm46v"),
    written=written,
    lacks={"verl": "verl 0.9's own forward for it fails under transformers 5"},
)
