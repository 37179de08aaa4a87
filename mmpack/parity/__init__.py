"""Whether the rollout engine and the trainer see the same layout: the first difference, its cause and the fix."""
