"""Images, videos and audios to Mediums: pixels or features, grids, content hashes and cache keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.layout.fingerprint import cache_key, content_hash
from mmpack.processors.arguments import items_of
from mmpack.processors.audio import audio_medium
from mmpack.processors.cache import MediaCache
from mmpack.processors.data_url import loaded
from mmpack.processors.images import path_below, rgb_pixels
from mmpack.processors.kinds import HEAD, is_picture, kind_of_file, kind_of_item
from mmpack.processors.messages import parts_of
from mmpack.processors.pixels import process
from mmpack.processors.settings import Parts
from mmpack.processors.videos import Clip, VideoReader
from mmpack.processors.views import media_of_cut
from mmpack.schema.media import Medium
from mmpack.video.files.container import open_file

PLACE = "processor: media"  # what errors call an item


class MediaMaker:
    """What `Processor` does with media; each distinct one is processed once, by content."""

    parts: Parts
    reader: VideoReader | None  # None: there is no video policy
    cache: MediaCache

    def __getstate__(self) -> dict[str, Any]:
        """Workers start with an empty cache: pixels are not worth sending."""
        return self.__dict__ | {"cache": MediaCache(self.cache.max_bytes)}

    def medium(self, item: Any, where: str = PLACE, kind: str | None = None) -> Medium:
        """A medium with pixels (features), grid, content hash and cache key; see `views`.

        Raises: as `views` does; ArgumentError for a picture of several views.
        """
        found = self.views(item, where, kind)
        if len(found) > 1:
            raise ArgumentError(
                f"{where}: {self.parts.family.name} cuts this picture into {len(found)} views, each a separate "
                "medium. Fix: call views(…), pass messages, or use an image processor with slice_mode=False"
            )
        return found[0]

    def views(self, item: Any, where: str = PLACE, kind: str | None = None) -> list[Medium]:
        """An image, a video or an audio to Mediums with pixels (features), grid, content hash and cache key.

        One; of a family that cuts a picture into views one for each: the whole, then its slices row by row. `kind`:
        `image`, `video`, `audio`, or `sound`: an audio that lies among the placeholders of the video before it. None:
        as `item` is, of files by their first bytes. A Medium is taken as it is, but of a video without pixels whose
        `source` lies below `media_root` the recorded frames are decoded again.
        Raises: ArgumentError (also where the file is no longer the one that was recorded), LayoutError, VideoError,
        AudioError.
        """
        item = loaded(item, where)
        if kind == "sound":
            medium = copy.copy(self.medium(item, where, "audio"))
            medium.in_video = True
            return [medium]
        if isinstance(item, Medium):
            again = item.modality == "video" and item.pixel_values is None and item.source
            if not again or self.parts.media_root is None or item.frame_indices is None:
                return [item]
        kind = self._kind(item, kind, where)
        if kind == "audio":
            return [self._audio(item, where)]
        if kind == "video":
            part = self.parts.settings["video"]
            reader = self._reader(where)
            return [reader.medium(item, self.parts.video_processor, part, self.cache, where)]
        return self._image(item, where)

    def media_from(self, items: Sequence[Any]) -> list[Medium]:
        """`views` of each item."""
        return self._made((None, item) for item in items_of(items, "media"))

    def media_of(self, messages: Any, media: Sequence[Any] | None) -> list[Medium]:
        """`views` of each medium of chat messages; `media`: of parts that are bare."""
        return self._made(parts_of(messages, media))

    def _made(self, items: Iterable[tuple[str | None, Any]]) -> list[Medium]:
        return [
            view
            for i, (kind, item) in enumerate(items)
            for view in self.views(item, f"processor: media[{i}]", kind)
        ]

    def clip(self, item: Any, where: str = PLACE) -> Clip:
        """The frames of a video as its loader hands them to a processor, and their plan: what an engine is given.

        Raises: ArgumentError, VideoError.
        """
        return self._reader(where).clip(loaded(item, where), self.parts.settings["video"], where)

    def rgb_pixels(self, image: Any, where: str = PLACE) -> tuple[np.ndarray, dict[str, Any]]:
        """uint8 [h, w, 3] as the image processor sees `image`, and Medium fields; see `images.rgb_pixels`.

        What becomes of transparency is the image processor's choice (transformers: dropped, from 5.23 on over white).
        """
        if self.parts.image_processor is None:
            raise ArgumentError(
                f"{where}: the processor has no image_processor, which reads pictures. "
                "Fix: pass wrap_processor(…, image_processor=…)"
            )
        return rgb_pixels(image, self.parts.media_root, where, self._to_rgb)

    def _image(self, item: Any, where: str) -> list[Medium]:
        """One medium, or one per view."""
        pixels, known = self.rgb_pixels(item, where)
        content = content_hash("image", pixels)
        p, part = self.parts, self.parts.settings["image"]
        # the grid follows from content and settings
        seen = cache_key(content, (0, 0, 0), part)
        done = self.cache.get(seen)
        if done is None:
            done = process(p.image_processor, pixels, part["backend"], p.family, where, p.kept_as)
            self.cache.put(seen, done)
        return media_of_cut(done, content, part, p.family, known)

    def _audio(self, item: Any, where: str) -> Medium:
        p, part = self.parts, self.parts.settings.get("audio")
        if part is None:
            raise ArgumentError(
                f"{where}: {p.family.name} takes no audio. Fix: use a family that does"
                if p.family.audio is None
                else f"{where}: the processor has no feature_extractor, which reads audio. "
                "Fix: pass wrap_processor(…, feature_extractor=…)"
            )
        return audio_medium(
            item, p.feature_extractor, part, p.family, p.media_root, self.cache, where
        )

    def _reader(self, where: str) -> VideoReader:
        if self.reader is None:
            family = self.parts.family
            why, fix = "takes a video as images", "pass one image part per frame"
            if family.video_token_id is not None:
                why = "has no video policy, so mmpack can't lay a video out"
                fix = "pass a Medium with the pixels and the grid that its own processor made"
            raise ArgumentError(f"{where}: {family.name} {why}. Fix: {fix}")
        return self.reader

    def _kind(self, item: Any, asked: str | None, where: str) -> str:
        """`image`, `video` or `audio`. Raises: ArgumentError where a file is plainly not what was asked for."""
        kind = kind_of_item(item)
        if (
            kind is not None or asked == "audio"
        ):  # of which there are too many to know by first bytes
            return asked or str(kind)
        if isinstance(item, (bytes, bytearray)):
            head = bytes(item[:HEAD])
        else:
            with open_file(path_below(item, self.parts.media_root, where)[0]) as file:
                head = file.read(HEAD)
        kind = kind_of_file(head)
        if asked == ("video" if is_picture(head) else "image") != kind:
            raise ArgumentError(
                f'{where} is in a part of type {asked}, but its file is not. Fix: write {{"type": "{kind}", …}}'
            )
        return asked or kind

    def _to_rgb(self, image: Any) -> np.ndarray:
        part = self.parts.image_processor
        channels_first = part.process_image(image, do_convert_rgb=part.do_convert_rgb)
        return np.ascontiguousarray(np.moveaxis(np.asarray(channels_first), 0, -1))
