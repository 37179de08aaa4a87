"""Policy and value losses; rewards, costs, returns and advantages of samples, turns and loss tokens [N]"""

from mmpack.errors import require
from mmpack.exports import exports

require("torch", "torch", __name__)

_HOME = {
    "mmpack.losses.advantages.ranks": ("gather_rewards",),
    "mmpack.losses.advantages.scopes": ("score_advantages",),
    "mmpack.losses.constrained.scatter": ("scatter_costs",),
    "mmpack.losses.distillation.divergence": ("teacher_divergence",),
    "mmpack.losses.distillation.loss": ("DistillationLoss",),
    "mmpack.losses.distillation.sampled": ("teacher_advantages", "teacher_logprobs"),
    "mmpack.losses.rewards.columns": ("score_columns",),
    "mmpack.losses.rewards.length": (
        "cosine_length_scores",
        "group_length_scores",
        "linear_length_scores",
        "soft_overlong_scores",
    ),
    "mmpack.losses.turns.advantages": ("turn_advantages",),
    "mmpack.losses.turns.turns": ("Turns", "turns_of"),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOME)
