"""From scores of samples, turns, regions and spans to one reward per loss token."""

from mmpack.ops.backend import Op

SCATTER_REWARDS = Op("scatter_rewards", __name__)
SCATTER_SCORES = Op("scatter_scores", __name__)
