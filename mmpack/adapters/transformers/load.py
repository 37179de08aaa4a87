"""A checkpoint by name or path: its model in fp32 on the CPU, and its processor, with or without torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils.import_utils import is_torchvision_available

from mmpack.adapters.transformers.without_torchvision import WITHOUT_TORCHVISION
from mmpack.errors import ArgumentError, MmpackError
from mmpack.families import family_of_model_type


def load_checkpoint(name: str) -> tuple[Any, Any]:
    """(model in eval mode, processor). Raises: ArgumentError if it can't be loaded; LayoutError for other families."""
    with loading("--model", name, "a folder with a checkpoint of an image-and-text model"):
        config = AutoConfig.from_pretrained(name)
        family = family_of_model_type(config.model_type)
        model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32)
        processor = _processor_class(family.processors[0]).from_pretrained(name)
    return model.eval(), processor


@contextmanager
def loading(option: str, name: str, folder: str) -> Iterator[None]:
    """Any error of this block becomes an ArgumentError of one line, unless it is mmpack's own.

    Args: `option`: of the command, whose value `name` is. `folder`: what it may name beside a hub name.
    """
    try:
        yield
    except MmpackError:
        raise
    except Exception as error:  # many libraries read a checkpoint, each with errors of its own
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ArgumentError(
            f"{option}: {name!r:.200} can't be loaded ({type(error).__name__}: {reason}). "
            f"Fix: {folder}, or a hub name"
        ) from None


def _processor_class(name: str) -> Any:
    return getattr(transformers, name) if is_torchvision_available() else WITHOUT_TORCHVISION[name]
