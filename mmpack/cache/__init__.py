"""Features of media: encoded once, kept while the tower that made them stays as it is."""

from mmpack.errors import needs

with needs("torch", __name__):
    import torch  # noqa: F401

from mmpack.cache.features import FeatureStats, FeatureStore
from mmpack.cache.summed import SummedFeatures

__all__ = ["FeatureStats", "FeatureStore", "SummedFeatures"]
