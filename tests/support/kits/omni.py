"""The Qwen-Omnis' processor in a kit, for pictures of at most 24 vision tokens and at most 10 seconds of sound."""

from __future__ import annotations

from typing import Any

from support.kits.base import Grid, written_with_markers

from mmpack.families import Family, get_family

AUDIO_TOWER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "output_dim": 128,
}


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """Placeholders between vision marks, of audio between audio marks."""
    audio = family.audio
    if modality != "audio" or audio is None:
        return written_with_markers(family, modality, grid)
    run = [audio.token_id] * family.tokens_of("audio", grid)
    return [audio.start_id, *run, audio.end_id]


def processor(family: str, tokenizer: Any = None) -> Any:
    """Takes some seconds without a tokenizer."""
    from support.replicas.omni_processor import omni_processor

    about = get_family(family)
    token = (about.patch_size * about.spatial_merge_size) ** 2  # pixels of one vision token
    return omni_processor(
        family, min_pixels=4 * token, max_pixels=24 * token, chunk_length=10, tokenizer=tokenizer
    )
