"""The chain: a step of one model in many layouts, compared stage by stage, forward and backward."""
