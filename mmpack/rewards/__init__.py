"""From scores of samples, turns, regions and spans to one reward a loss token."""

from mmpack.errors import require

require("torch", "torch", __name__)
