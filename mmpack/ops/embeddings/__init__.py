"""Vision features put into the embeddings of text, all deepstack levels at once."""

from mmpack.ops.backend import Op

MERGE_EMBEDDINGS = Op("merge_embeddings", __name__)
