"""The parts of a processor: tokenizer, media processors and a family, and the settings that they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmpack.families import Family
from mmpack.layout.fingerprint import fingerprint
from mmpack.processors.audio import audio_settings
from mmpack.processors.cache import MediaCache
from mmpack.processors.settings import TokenizerHash, describe, vocab_size
from mmpack.processors.videos import VideoReader


class Parts:
    """What `wrap_processor` has checked, and a cache of pixels."""

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        video_processor: Any,
        family: Family,
        chat_template: str | None,
        position_rule: str,
        tokens_per_second: float | None,
        video_markers: str,
        media_root: Path | None,
        cache_bytes: int,
        videos: VideoReader | None,
        kept_as: str = "float32",
        numbered: bool = False,
        feature_extractor: Any = None,
    ):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.feature_extractor = feature_extractor
        self.family = family
        self.chat_template = chat_template
        self.position_rule = position_rule
        seconds = family.tokens_per_second if tokens_per_second is None else tokens_per_second
        self.tokens_per_second = None if seconds is None else float(seconds)
        self.video_markers = video_markers
        self.media_root = media_root
        self.videos = videos
        self.kept_as = kept_as  # what pixels are held as
        self.numbered = numbered  # writes each picture's number before its views
        self.cache = MediaCache(cache_bytes)
        self._tokenizer_hash = TokenizerHash()

    def __getstate__(self) -> dict[str, Any]:
        """Workers start with an empty cache: pixels are not worth sending."""
        return self.__dict__ | {"cache": MediaCache(self.cache.max_bytes)}

    @property
    def settings(self) -> dict[str, Any]:
        """`Sample.processor`: every setting that decides the layout, as the parts have it now."""
        out = describe(
            self.family,
            self.tokenizer,
            self.image_processor,
            self.video_processor,
            self.chat_template,
            self.position_rule,
            self.tokens_per_second,
            self.video_markers,
            self._tokenizer_hash,
            None if self.videos is None else self.videos.sampling,
            self._audio_settings(),
        )
        if self.family.views is not None and out["image"] is not None:
            out["image"]["use_image_id"] = self.numbered
        return out

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return vocab_size(self.family, self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """`sha256:<64 hex>` of `settings`."""
        return fingerprint(self.settings)

    def _audio_settings(self) -> dict[str, Any] | None:
        audio = self.family.audio
        return None if audio is None else audio_settings(self.feature_extractor, audio)
