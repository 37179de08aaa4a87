"""What `mmpack probe` takes as a side: a record file, or KIND:NAME?option=value&….

hf:DIR       a checkpoint's folder or hub name     layout, dtype, attached, attention, temperature, kept_ids, device
tiny:FAMILY  a tiny random model of `mmpack smoke` the same, and seed
vllm:DIR     a real vLLM engine on this machine    dtype, prefix_caching
python:MODULE:FUNCTION  a Side that a function returns  its own keywords, as text
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from mmpack.demo.options import MAX_SEED
from mmpack.errors import ArgumentError, check_number, require
from mmpack.probe.record_file import SUFFIX

if TYPE_CHECKING:
    from mmpack.probe.side import Side

KINDS = ("hf", "tiny", "vllm", "python")
COMMON = ("layout", "dtype", "attached", "attention", "temperature", "kept_ids", "device")
OPTIONS = {"hf": COMMON, "tiny": (*COMMON, "seed"), "vllm": ("dtype", "prefix_caching")}


@dataclass
class Spec:
    """A side as it was written."""

    text: str
    kind: str  # of KINDS, or "file"
    name: str
    options: dict[str, str]

    @property
    def family(self) -> str | None:
        """Family of a tiny model, whose samples can be drawn."""
        return self.name if self.kind == "tiny" else None


def parse(text: str) -> Spec:
    """Raises: ArgumentError for what is no side."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        if text.endswith(SUFFIX):
            return Spec(text, "file", text, {})
        raise ArgumentError(
            f"probe: {text!r:.80} is not a side. "
            f"Fix: pass a file that ends in {SUFFIX}, or hf:DIR, tiny:FAMILY, vllm:DIR, "
            "python:MODULE:FUNCTION, each with ?option=value&…"
        )
    name, _, query = rest.partition("?")
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        raise ArgumentError(
            f"probe: {query!r:.80} is not a list of options. Fix: write option=value&option=value"
        ) from None
    options = dict(pairs)
    if not name or len(options) < len(pairs):
        raise ArgumentError(
            f"probe: {text!r:.80} has no name, or the same option twice. Fix: write KIND:NAME?option=value&…"
        )
    for option in options:
        if kind in OPTIONS and option not in OPTIONS[kind]:
            raise ArgumentError(
                f"probe: {kind}: has no option {option!r:.40}. Fix: use one of {', '.join(OPTIONS[kind])}"
            )
    return Spec(text, kind, name, options)


class Sides:
    """Makes sides of specifications; one checkpoint is loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self.close: list[Callable[[], None]] = []

    def side(self, spec: Spec) -> Side:
        if spec.kind == "python":
            return _from_python(spec)
        if spec.kind == "vllm":
            return self._vllm(spec)
        return self._transformers(spec)

    def processor(self, spec: Spec) -> Any:
        """The checkpoint's processor; None where there is none."""
        if spec.kind != "hf":
            return None
        require("transformers", "hf", "mmpack probe")
        from mmpack.adapters.transformers.load import load_processor

        return load_processor(spec.name, "probe: hf")

    def _transformers(self, spec: Spec) -> Side:
        require("transformers", "hf", "mmpack probe")
        from mmpack.adapters.transformers.probe import probe_side

        given = {name: _READ[name](text, name) for name, text in spec.options.items()}
        model, device = self._model(spec, given.pop("seed", 0)), given.pop("device", None)
        attention = given.pop("attention", None)
        if device is not None or attention is not None:
            model = copy.deepcopy(model)
        try:
            model = model if device is None else model.to(device)
            if attention is not None:
                model.set_attn_implementation(attention)
        except (RuntimeError, AssertionError, ValueError, ImportError) as error:
            why = (str(error).splitlines() or [""])[0][:120]
            raise ArgumentError(
                f"probe: device {device!r:.40} or attention {attention!r:.40} can't be used ({why}). "
                "Fix: use cpu, or cuda where there is a GPU; eager or sdpa"
            ) from None
        return probe_side(model, spec.text, **given)

    def _model(self, spec: Spec, seed: int) -> Any:
        check_number("probe", "seed", seed, least=0, most=MAX_SEED)
        key = f"{spec.kind}:{spec.name}:{seed}"
        if key not in self._loaded:
            if spec.kind == "tiny":
                from mmpack.demo.tiny_models import tiny_model

                self._loaded[key] = tiny_model(spec.name, seed)
            else:
                from mmpack.adapters.transformers.load import load_model

                self._loaded[key] = load_model(spec.name, "probe: hf")
        return self._loaded[key]

    def _vllm(self, spec: Spec) -> Side:
        from mmpack.adapters.vllm import VllmEngine
        from mmpack.adapters.vllm.probe import engine_side

        options: dict[str, Any] = dict(spec.options)
        if "prefix_caching" in options:
            options["prefix_caching"] = _flag(options["prefix_caching"], "prefix_caching")
        engine = VllmEngine(spec.name, **options)
        self.close.append(engine.close)
        return engine_side(engine, spec.text)


def _from_python(spec: Spec) -> Side:
    from mmpack.probe.side import Side

    module, _, function = spec.name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            f"probe: {spec.name!r:.80} can't be imported ({' '.join(str(error).split())[:120]}). "
            "Fix: write python:MODULE:FUNCTION, with MODULE on PYTHONPATH"
        ) from None
    try:
        made = make(**spec.options)
    except TypeError as error:
        raise ArgumentError(
            f"probe: {spec.name!r:.80} can't be called with these options ({' '.join(str(error).split())[:120]}). "
            "Fix: pass the options that it takes, as ?option=value"
        ) from None
    if not isinstance(made, Side):
        raise ArgumentError(
            f"probe: {spec.name!r:.80} does not return a Side. Fix: let it return mp.probe.Side(…)"
        )
    return made


def _dtype(text: str, name: str) -> Any:
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(
            f"probe: dtype is {text!r:.40}. Fix: pass float32, bfloat16, float16 or float64"
        )
    return found


def _number(text: str, name: str, kind: type = float) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ArgumentError(f"probe: {name} is {text!r:.40}. Fix: write a number") from None


def _flag(text: str, name: str) -> bool:
    values = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text not in values:
        raise ArgumentError(f"probe: {name} is {text!r:.40}. Fix: write yes or no")
    return values[text]


# of each option of a side that transformers runs: its text and name -> its value
_READ: dict[str, Callable[[str, str], Any]] = {
    "layout": lambda text, name: text,
    "device": lambda text, name: text,
    "attention": lambda text, name: text,
    "dtype": _dtype,
    "temperature": _number,
    "attached": _flag,
    "kept_ids": _flag,
    "seed": partial(_number, kind=int),
}


def with_pixels(samples: list[Any], root: Path, hf_processor: Any) -> None:
    """Give pictures and videos their pixels, from the files below `root` that `source` names.

    Raises: ArgumentError for a medium without a source, or whose file no longer gives its cache key.
    """
    from mmpack.processors.wrap import wrap_processor

    processor = wrap_processor(hf_processor, media_root=root)
    for sample in samples:
        for medium in sample.media:
            where = f"probe: {sample.sample_id!r:.60}, {medium.media_id!r:.60}"
            if medium.pixel_values is not None:
                continue
            if not medium.source:
                raise ArgumentError(
                    f"{where} names no source file. Fix: pass --draw-pixels, or a trace with sources"
                )
            item = medium if medium.modality == "video" else medium.source
            made = processor.medium(item, where, medium.modality)
            if made.cache_key != medium.cache_key:
                raise ArgumentError(
                    f"{where}: its file gives pixels or a grid that differ from the record. "
                    "Fix: use the file and the processor that made the trace"
                )
            medium.pixel_values = made.pixel_values
