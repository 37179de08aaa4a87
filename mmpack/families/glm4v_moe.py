"""GLM-4.5V: GLM-4.1V's layout with ids of its own, and experts.

GLM-4.6V is of this model type too, and of family `glm46v`: it writes and samples videos otherwise.
"""

from dataclasses import replace

from mmpack.families.glm4v import GLM4V

GLM4V_MOE = replace(
    GLM4V,
    name="glm4v_moe",
    model_types=("glm4v_moe",),
    image_token_id=151363,
    video_token_id=151363,
    video_prompt_id=151364,
)
