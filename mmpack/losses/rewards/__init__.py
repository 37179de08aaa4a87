"""From scores of samples, turns, regions and spans to one reward per loss token."""
