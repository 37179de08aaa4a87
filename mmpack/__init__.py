"""mmpack: the data layer of multimodal RL.

Public names are loaded when first used: `import mmpack` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from mmpack import notebook as _notebook
from mmpack._version import __version__

_HOME = {
    "mmpack.deprecated": ("DeprecatedWarning",),
    "mmpack.families.base": ("Family",),
    "mmpack.families.register": ("register_family",),
    "mmpack.schema.sample": ("Sample",),
    "mmpack.schema.media": ("Medium",),
    "mmpack.schema.codec": ("CodecIds",),
    "mmpack.schema.spans": (
        "ActionSpan",
        "BboxTarget",
        "Cost",
        "LossSpan",
        "ModalitySpan",
        "ObservationSpan",
        "PointTarget",
        "PolicyVersion",
        "RegionSpan",
        "Score",
    ),
    "mmpack.schema.ragged": ("Ragged",),
    "mmpack.schema.routes": ("compact_routes",),
    "mmpack.schema.rules": ("Problem", "check", "validate"),
    "mmpack.schema.dead_letters": ("DeadLetter", "DeadLetters"),
    "mmpack.schema.trace": ("read_trace", "write_trace"),
    "mmpack.layout.mrope": ("mrope_positions",),
    "mmpack.processors.workers": ("SampleWorkers",),
    "mmpack.processors.wrap": ("wrap_processor",),
    "mmpack.planning.plan": ("Plan", "plan"),
    "mmpack.ops.logprobs.selected": ("selected_logprobs",),
    "mmpack.ops.logprobs.support": ("ScoredSupport", "Support"),
    "mmpack.ops.logprobs.listed": (
        "ListedLogprobs",
        "linear_listed_logprobs",
        "listed_logprobs",
    ),
    "mmpack.ops.logprobs.linear.selected": ("linear_selected_logprobs",),
    "mmpack.ops.embeddings.merge": ("merge_embeddings",),
    "mmpack.ops.projection.project": ("Projection", "project_and_merge"),
    "mmpack.packing.batch": ("PackedBatch",),
    "mmpack.packing.collate": ("collate",),
    "mmpack.packing.idle": ("idle_batch",),
    "mmpack.packing.pack": ("pack",),
    "mmpack.packing.pad": ("PaddedBatch", "pad"),
    "mmpack.losses.rewards.scatter": ("scatter_rewards",),
    "mmpack.losses.constrained.scatter": ("scatter_costs",),
    "mmpack.losses.rewards.columns": ("score_columns",),
    "mmpack.losses.advantages.group": ("group_advantages",),
    "mmpack.losses.advantages.ranks": ("gather_rewards", "group_numbers"),
    "mmpack.losses.advantages.scopes": ("score_advantages",),
    "mmpack.losses.turns.advantages": ("turn_advantages",),
    "mmpack.losses.turns.turns": ("Turns", "turns_of"),
    "mmpack.losses.rewards.length": (
        "cosine_length_scores",
        "group_length_scores",
        "linear_length_scores",
        "soft_overlong_scores",
    ),
    "mmpack.losses.returns.returns": ("discounted_returns", "gae"),
    "mmpack.losses.policy.loss": ("PolicyLoss", "policy_loss"),
    "mmpack.losses.value": ("value_loss",),
    "mmpack.losses.distillation.divergence": ("teacher_divergence",),
    "mmpack.losses.distillation.loss": ("DistillationLoss", "distillation_loss"),
    "mmpack.losses.distillation.sampled": ("teacher_advantages", "teacher_logprobs"),
    "mmpack.parity.compare": ("compare",),
    "mmpack.parity.report": ("Finding", "ParityReport"),
    "mmpack.logged": ("metrics",),
    "mmpack.errors": (
        "ArgumentError",
        "AudioError",
        "BackendError",
        "BlobError",
        "GroupWarning",
        "LayoutError",
        "LossWarning",
        "MissingExtraError",
        "MmpackError",
        "MmpackWarning",
        "ModelError",
        "PlanError",
        "SchemaError",
        "TemplateWarning",
        "TraceError",
        "UnwrittenWarning",
        "VideoError",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
# packages that are public by their own name, as in mp.video.sample
_ROOMS = (
    "audio",
    "blobs",
    "cache",
    "grounding",
    "invariant",
    "planning",
    "probe",
    "trajectory",
    "video",
    "view",
)

__all__ = ["__version__", *sorted([*_MODULE_OF, *_ROOMS])]

_notebook.load_with(lambda: importlib.import_module("mmpack.view"))
logging.getLogger("mmpack").addHandler(logging.NullHandler())  # who runs it decides what is heard


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"mmpack.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mmpack' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
