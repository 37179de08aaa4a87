"""GLM-4.6V: GLM-4.5V's ids, tenths of seconds behind frames, and frames taken by another rule.

Checkpoints are `glm4v` (GLM-4.6V-Flash, told from GLM-4.1V by its ids) or `glm4v_moe` (GLM-4.6V: the model of that
family, whose samples have this layout); transformers also has a type of its own.
"""

from dataclasses import replace

from mmpack.families.glm4v_moe import GLM4V_MOE

assert GLM4V_MOE.video is not None
GLM46V = replace(
    GLM4V_MOE,
    name="glm46v",
    model_types=("glm46v", "glm4v"),
    processors=("Glm46VProcessor",),
    texts=replace(GLM4V_MOE.texts, frame="{run}{seconds:.1f} seconds"),
    video=replace(GLM4V_MOE.video, policies=("transformers_glm46v",)),
)
