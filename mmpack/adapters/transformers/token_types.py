"""Which tokens stand for media, for forwards that ask for it: models whose media see each other in both directions."""

import torch

from mmpack.families import Family
from mmpack.schema.spans import MODALITIES


def token_types(ids: torch.Tensor, family: Family) -> torch.Tensor:
    """Like `ids`: 1 at placeholders of images, 2 at those of videos, 3 at those of audio, 0 elsewhere."""
    out = torch.zeros_like(ids)
    for modality, placeholder in family.placeholder_ids.items():
        out += (ids == placeholder) * (1 + MODALITIES.index(modality))
    return out
