# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.schema.codec import CodecIds as CodecIds
from mmpack.schema.dead_letters import DeadLetter as DeadLetter
from mmpack.schema.dead_letters import DeadLetters as DeadLetters
from mmpack.schema.ragged import Ragged as Ragged
from mmpack.schema.routes import compact_routes as compact_routes
from mmpack.schema.rules import Problem as Problem
from mmpack.schema.spans import ActionSpan as ActionSpan
from mmpack.schema.spans import BboxTarget as BboxTarget
from mmpack.schema.spans import Cost as Cost
from mmpack.schema.spans import ModalitySpan as ModalitySpan
from mmpack.schema.spans import ObservationSpan as ObservationSpan
from mmpack.schema.spans import PointTarget as PointTarget
from mmpack.schema.spans import PolicyVersion as PolicyVersion
from mmpack.schema.spans import RegionSpan as RegionSpan
