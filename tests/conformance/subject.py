"""One family under test: its model, its drawn samples and their oracles, each made once and when first asked for."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from conformance.agree import NotHere, expect
from conformance.oracle import Gradients, exact, separate
from PIL import Image
from support.kits import Kit
from support.kits.samples import mixed_samples
from transformers.utils.import_utils import is_torchvision_available

from mmpack.adapters.transformers.attention import is_attached
from mmpack.errors import installed_version
from mmpack.families import Family
from mmpack.processors.wrap import Processor, wrap_processor
from mmpack.schema.sample import Sample


class Subject:
    """What the checks read. The model is in float32 on the CPU, with its own attention between checks."""

    def __init__(self, kit: Kit):
        if not kit.available:
            version = installed_version("transformers")
            raise NotHere(f"transformers {version} has no {kit.model_class}")
        self.kit = kit

    @property
    def family(self) -> Family:
        return self.kit.about

    @cached_property
    def model(self) -> Any:
        return self.kit.small()

    @cached_property
    def samples(self) -> list[Sample]:
        """`mixed_samples`: a shared prompt at two depths, pictures, a clip, text."""
        return mixed_samples(self.kit)

    @cached_property
    def exact(self) -> tuple[torch.Tensor, Gradients]:
        """Values [N] and gradients in float64, by the model's own attention."""
        expect(not is_attached(self.model), "the model is attached before its oracle is made")
        return exact(self.model, self.samples)

    @cached_property
    def separate(self) -> tuple[torch.Tensor, Gradients]:
        """The same in float32, one sample at a time."""
        expect(not is_attached(self.model), "the model is attached before its oracle is made")
        return separate(self.model, self.samples)

    @cached_property
    def processor(self) -> Any:
        """transformers' own processor. Raises: NotHere where there is none without a hub."""
        if self.kit.processor is None:
            raise NotHere("its kit has no processor")
        if self.kit.needs_torchvision and not is_torchvision_available():
            raise NotHere("its processor needs torchvision")
        try:
            return self.kit.processor()
        except ImportError as error:  # of an extra, or of transformers' own parts
            raise NotHere(" ".join(str(error).split())[:200]) from None

    @cached_property
    def wrapped(self) -> Processor:
        return wrap_processor(self.processor, family=self.kit.family)

    @cached_property
    def pictures(self) -> list[Image.Image]:
        """Two of unlike sizes, noise."""
        random = np.random.default_rng(7)
        sizes = ((90, 120), (150, 64))
        return [
            Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes
        ]


def user(*parts: Any) -> list[dict[str, Any]]:
    """A message of texts and pictures, in order."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]
