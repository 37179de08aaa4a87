"""The ops of this room, as `mmpack doctor` lists them; attention and the delta rule report by themselves."""

from mmpack.ops.attention.fixed_blocks import FIXED_BLOCKS
from mmpack.ops.backend import Op
from mmpack.ops.embeddings import MERGE_EMBEDDINGS
from mmpack.ops.linear_attention import SEGMENT_CONV1D
from mmpack.ops.logprobs import SELECTED_LOGPROBS
from mmpack.ops.logprobs.linear import LINEAR_SELECTED_LOGPROBS
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.norms import RMS_NORM, ROW_SUM
from mmpack.ops.patches import NORMALIZE_BYTES, PACK_VIDEO, UNPACK_VIDEO
from mmpack.ops.products import PRODUCT
from mmpack.ops.projection import PROJECT_AND_MERGE
from mmpack.ops.rows import GATHER_ROWS, SCATTER_ROWS, SUM_ROWS

OPS: tuple[Op, ...] = (
    GATHER_ROWS,
    SUM_ROWS,
    SCATTER_ROWS,
    MERGE_EMBEDDINGS,
    PROJECT_AND_MERGE,
    SELECTED_LOGPROBS,
    LINEAR_SELECTED_LOGPROBS,
    SUPPORT_LOGPROBS,
    PACK_VIDEO,
    UNPACK_VIDEO,
    NORMALIZE_BYTES,
    PRODUCT,
    ROW_SUM,
    RMS_NORM,
    SEGMENT_CONV1D,
    FIXED_BLOCKS,
)
