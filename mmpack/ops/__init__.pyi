# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.ops.logprobs.listed import ListedLogprobs as ListedLogprobs
from mmpack.ops.logprobs.listed import linear_listed_logprobs as linear_listed_logprobs
from mmpack.ops.logprobs.listed import listed_logprobs as listed_logprobs
from mmpack.ops.logprobs.support import ScoredSupport as ScoredSupport
from mmpack.ops.logprobs.support import Support as Support
from mmpack.ops.patches.pack import pack_video as pack_video
from mmpack.ops.patches.pack import unpack_video as unpack_video
from mmpack.ops.projection.project import Projection as Projection
from mmpack.ops.projection.project import project_and_merge as project_and_merge
