"""mmpack: the data layer of multimodal RL.

Public names are loaded when first used: `import mmpack` loads neither torch nor transformers.
"""

import importlib
import logging

from mmpack import notebook as _notebook
from mmpack._version import __version__
from mmpack.exports import exports

_HOME = {
    "mmpack.families.base": ("Family",),
    "mmpack.families.register": ("register_family",),
    "mmpack.schema.sample": ("Sample",),
    "mmpack.schema.media": ("Medium",),
    "mmpack.schema.spans": ("LossSpan", "Score"),
    "mmpack.schema.rules": ("check", "validate"),
    "mmpack.schema.trace": ("read_trace", "write_trace"),
    "mmpack.layout.mrope": ("mrope_positions",),
    "mmpack.processors.workers": ("SampleWorkers",),
    "mmpack.processors.wrap": ("wrap_processor",),
    "mmpack.planning.plan": ("Plan", "plan"),
    "mmpack.ops.logprobs.selected": ("selected_logprobs",),
    "mmpack.ops.logprobs.linear.selected": ("linear_selected_logprobs",),
    "mmpack.ops.embeddings.merge": ("merge_embeddings",),
    "mmpack.packing.batch": ("PackedBatch",),
    "mmpack.packing.collate": ("collate",),
    "mmpack.packing.idle": ("idle_batch",),
    "mmpack.packing.pack": ("pack",),
    "mmpack.packing.pad": ("PaddedBatch", "pad"),
    "mmpack.losses.rewards.scatter": ("scatter_rewards",),
    "mmpack.losses.advantages.group": ("group_advantages",),
    "mmpack.losses.advantages.ranks": ("group_numbers",),
    "mmpack.losses.returns.returns": ("discounted_returns", "gae"),
    "mmpack.losses.policy.loss": ("PolicyLoss", "policy_loss"),
    "mmpack.losses.value": ("value_loss",),
    "mmpack.losses.distillation.loss": ("distillation_loss",),
    "mmpack.parity.compare": ("compare",),
    "mmpack.parity.report": ("ParityReport",),
    "mmpack.logged": ("metrics",),
    "mmpack.errors": (
        "ArgumentError",
        "BackendError",
        "LayoutError",
        "MissingExtraError",
        "MmpackError",
        "MmpackWarning",
        "ModelError",
        "PlanError",
        "SchemaError",
    ),
}
# packages that are public by their own name, as in mp.video.sample
_ROOMS = (
    *("audio", "blobs", "cache", "errors", "grounding", "invariant", "losses", "ops", "planning"),
    *("probe", "schema", "trajectory", "video", "view"),
)
__getattr__, __dir__, __all__ = exports(__name__, _HOME, _ROOMS)
__all__ = ["__version__", *__all__]

_notebook.load_with(lambda: importlib.import_module("mmpack.view"))
logging.getLogger("mmpack").addHandler(logging.NullHandler())  # who runs it decides what is heard
