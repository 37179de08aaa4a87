"""A checkpoint by name or path: its model in fp32 on the CPU, its processor, its tokenizer as a function to text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PretrainedConfig
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_torchvision_available

from mmpack.adapters.transformers.without_torchvision import WITHOUT_TORCHVISION
from mmpack.errors import ArgumentError, MmpackError
from mmpack.families import FAMILIES, Family, family_of_config, family_of_model_type
from mmpack.versions import refuse_old_transformers

FOLDER = "a folder with a checkpoint of an image-and-text model"


def load_checkpoint(name: str, option: str = "--model") -> tuple[Any, Any]:
    """(model in eval mode, processor). Raises: ArgumentError if it can't be loaded; LayoutError for other
    families; ModelError where transformers is too old for the family.
    """
    return load_model(name, option), load_processor(name, option)


def load_model(name: str, option: str = "--model") -> Any:
    """The model in fp32 and eval mode; raises as `load_checkpoint`."""
    with loading(option, name, FOLDER), _quiet():
        _family(name, option)
        return AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32).eval()


def load_processor(name: str, option: str = "--model") -> Any:
    """The checkpoint's processor; raises as `load_checkpoint`."""
    with loading(option, name, f"{FOLDER} and its processor's files"):
        family = _family(name, option)
        return _processor_class(_written_class(name) or family.processors[0]).from_pretrained(name)


def _family(name: str, option: str) -> Family:
    """The checkpoint's. Raises: ModelError for one that the installed transformers lacks."""
    known, _ = PretrainedConfig.get_config_dict(name)
    refuse_old_transformers(family_of_model_type(known.get("model_type", "")), option)
    return family_of_config(AutoConfig.from_pretrained(name))


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers, unless stderr is a terminal."""
    bars = transformers.utils.logging
    hide = not sys.stderr.isatty() and bars.is_progress_bar_enabled()
    if hide:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            bars.enable_progress_bar()


@contextmanager
def loading(option: str, name: str, folder: str) -> Iterator[None]:
    """Any error of this block becomes an ArgumentError of one line, unless it is mmpack's own.

    Args: `option`: of the command, whose value `name` is. `folder`: what it may name other than a hub name.
    """
    try:
        yield
    except MmpackError:
        raise
    except Exception as error:  # many libraries read a checkpoint, each with errors of its own
        reason = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        raise ArgumentError(
            f"{option}: {name!r:.200} can't be loaded ({type(error).__name__}: {reason}). "
            f"Fix: name {folder}, or a hub name"
        ) from None


def _written_class(name: str) -> str | None:
    """The class of the checkpoint's processor, if its files say one that mmpack knows: one model may have several."""
    known = {p for family in FAMILIES.values() for p in family.processors}
    for file in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        written = None
        if found is not None:
            written = json.loads(Path(found).read_text("utf-8")).get("processor_class")
        if written in known:
            return str(written)
    return None


def _processor_class(name: str) -> Any:
    if name in WITHOUT_TORCHVISION and not is_torchvision_available():
        return WITHOUT_TORCHVISION[name]
    return getattr(transformers, name)


def load_tokenizer(name: str) -> Any:
    """transformers' tokenizer. Raises: ArgumentError if `name` can't be loaded."""
    with loading("--tokenizer", name, "a folder with a tokenizer"):
        return AutoTokenizer.from_pretrained(name)


def load_decoder(name: str) -> Callable[[Sequence[int]], str]:
    """ids -> text: special tokens kept, spaces as they are, ids beyond the vocabulary as <id N>.

    Raises: ArgumentError if `name` can't be loaded.
    """
    tokenizer = load_tokenizer(name)
    known = len(tokenizer)

    def decode(ids: Sequence[int]) -> str:
        out = []
        for has_text, run in groupby(map(int, ids), lambda i: i < known):
            if has_text:
                out.append(str(tokenizer.decode(list(run), clean_up_tokenization_spaces=False)))
            else:
                out += [f"<id {i}>" for i in run]
        return "".join(out)

    return decode
