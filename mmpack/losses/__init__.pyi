# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.losses.advantages.ranks import gather_rewards as gather_rewards
from mmpack.losses.advantages.scopes import score_advantages as score_advantages
from mmpack.losses.constrained.scatter import scatter_costs as scatter_costs
from mmpack.losses.distillation.divergence import teacher_divergence as teacher_divergence
from mmpack.losses.distillation.loss import DistillationLoss as DistillationLoss
from mmpack.losses.distillation.sampled import teacher_advantages as teacher_advantages
from mmpack.losses.distillation.sampled import teacher_logprobs as teacher_logprobs
from mmpack.losses.rewards.columns import score_columns as score_columns
from mmpack.losses.rewards.length import cosine_length_scores as cosine_length_scores
from mmpack.losses.rewards.length import group_length_scores as group_length_scores
from mmpack.losses.rewards.length import linear_length_scores as linear_length_scores
from mmpack.losses.rewards.length import soft_overlong_scores as soft_overlong_scores
from mmpack.losses.turns.advantages import turn_advantages as turn_advantages
from mmpack.losses.turns.turns import Turns as Turns
from mmpack.losses.turns.turns import turns_of as turns_of
