"""The contents of a trace: samples, media, spans, their rules (MMxxx), trace files, the JSON schema (numpy)."""

from mmpack.exports import exports

_HOME = {
    "mmpack.schema.codec": ("CodecIds",),
    "mmpack.schema.dead_letters": ("DeadLetter", "DeadLetters"),
    "mmpack.schema.ragged": ("Ragged",),
    "mmpack.schema.routes": ("compact_routes",),
    "mmpack.schema.rules": ("Problem",),
    "mmpack.schema.spans": (
        "ActionSpan",
        "BboxTarget",
        "Cost",
        "ModalitySpan",
        "ObservationSpan",
        "PointTarget",
        "PolicyVersion",
        "RegionSpan",
    ),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOME)
