"""GLM-4.1V: half of a head rotates, three sections one after the other; a tower that interpolates its positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from support.kits.base import Grid, Kit
from support.kits.parts import HALF, TEXT, TOWER, rope, whole, without

from mmpack.families import Family

TEXT_CONFIG = without(TEXT, "head_dim", "bos_token_id", "eos_token_id") | {
    "vocab_size": 151_552,
    "pad_token_id": 151_329,
    **rope(10_000.0, [2, 3, 3], partial_rotary_factor=0.5),
}
GLM_TOWER = TOWER | {"image_size": 56}
NARROW_GLM = {"text_config": HALF, "vision_config": {"out_hidden_size": 64}}


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """An image between its marks; a video between its own, each patch with its second behind it."""
    runs = family.spans_of(modality, grid)
    run = [family.placeholder_ids[modality]] * (family.vision_tokens(grid) // runs)
    assert family.video_bounds is not None
    one = [*family.starts, *run, *family.ends]
    if modality == "image":
        return one
    begin, end = family.video_bounds
    return [begin, *(i for k in range(runs) for i in (*one, 15 + k)), end]


def processor(family: str, tokenizer: Any = None) -> Any:
    """For pictures of at most 24 vision tokens."""
    from support.replicas.glm_processor import glm_processor

    volume = 2 * 28**2  # pixels of one vision token, in both frames
    return glm_processor(family, min_pixels=4 * volume, max_pixels=24 * volume, tokenizer=tokenizer)


KIT = Kit(
    family="glm4v",
    heavy=True,
    model_class="Glm4vForConditionalGeneration",
    config_class="Glm4vConfig",
    config=whole(TEXT_CONFIG, GLM_TOWER),
    narrow=NARROW_GLM,
    processor=partial(processor, "glm4v"),
    written=written,
    lacks={"verl": "verl 0.9's own forward for it fails under transformers 5"},
)
