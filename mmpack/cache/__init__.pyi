# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.cache.features import FeatureStore as FeatureStore
from mmpack.cache.index import PrefixIndex as PrefixIndex
from mmpack.cache.keys import prefix_keys as prefix_keys
from mmpack.cache.predict import predict_cached_tokens as predict_cached_tokens
from mmpack.cache.rows import RowStore as RowStore
from mmpack.cache.summed import SummedFeatures as SummedFeatures
