"""Features of media: encoded once, kept while the tower that made them stays as it is (torch, no transformers)"""

from mmpack.cache.features import FeatureStats, FeatureStore
from mmpack.cache.summed import SummedFeatures

__all__ = ["FeatureStats", "FeatureStore", "SummedFeatures"]
