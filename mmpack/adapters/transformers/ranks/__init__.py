"""Steps of many ranks: as many micro-batches on each, no idle towers, media encoded where there is room."""

from mmpack.adapters.transformers.ranks.encode_together import SharedFeatures, encode_together
from mmpack.adapters.transformers.ranks.in_step import StepPacks, in_step

__all__ = ["SharedFeatures", "StepPacks", "encode_together", "in_step"]
