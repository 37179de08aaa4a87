"""GLM-4.5V: a dense layer, then eight experts in two groups, two per token, and one that is shared."""

from functools import partial

from support.kits.base import Kit
from support.kits.glm4v import GLM_TOWER, NARROW_GLM, TEXT_CONFIG, processor, written
from support.kits.parts import whole

EXPERTS = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
KIT = Kit(
    family="glm4v_moe",
    heavy=True,
    model_class="Glm4vMoeForConditionalGeneration",
    config_class="Glm4vMoeConfig",
    config=whole(TEXT_CONFIG | {"num_hidden_layers": 3} | EXPERTS, GLM_TOWER),
    narrow=NARROW_GLM,
    processor=partial(processor, "glm4v_moe"),
    written=written,
    spread=2.0,
    lacks={"verl": "verl 0.9's own forward for it accepts no clips"},
)
