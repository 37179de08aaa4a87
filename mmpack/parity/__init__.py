"""Whether a rollout engine and a trainer see the same layout; if not, where, why, and what to do."""
