"""Credit for turns: the turns of trajectories, whatever samples hold them, their rewards and their advantages."""
