"""The contents of a trace: samples, media, spans, their rules (MMxxx), trace files, the JSON schema (numpy)."""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
