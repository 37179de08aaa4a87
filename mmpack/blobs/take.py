"""Samples leave their pixels behind: in a store, under their cache keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mmpack.schema.sample import Sample, as_samples


class Keeps(Protocol):
    """A store of pixels by cache key: BlobFolder, SharedBlobs, RayBlobs."""

    def put(self, key: str, pixels: Any) -> bool: ...

    def release(self, keys: Iterable[str] | None = None) -> None: ...


def take(samples: Sequence[Sample], store: Keeps) -> list[Sample]:
    """The same samples without pixels, which are in `store` now: small enough to send anywhere.

    Each distinct medium is written once, whoever of the node has it. The store holds them for this process: call
    `store.release()` when the step is done. `mp.pack(samples, media=store)` finds them again. Raises: BlobError (MM503)
    if they don't fit; nothing of this call is held then.

    Example:
        >>> import tempfile, numpy as np, mmpack as mp
        >>> medium = mp.Medium("m", "image", "ab" * 32, (1, 2, 2), 1, pixel_values=np.ones((4, 1176)))
        >>> ids = np.array([151652, 151655, 151653, 7])
        >>> spans = [mp.schema.ModalitySpan(1, 2, "image", 0)]
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", ids, [medium], spans, [mp.LossSpan(3, 4)])
        >>> with tempfile.TemporaryDirectory() as folder, mp.blobs.BlobFolder(folder) as store:
        ...     [lean] = mp.blobs.take([sample], store)
        ...     print(lean.media[0].pixel_values, mp.pack([lean], media=store).pixel_values.shape)
        None torch.Size([4, 1176])
    """
    held: list[str] = []
    lean = []
    try:
        for sample in as_samples(samples, "take"):
            for medium in sample.media:
                if medium.pixel_values is not None:
                    store.put(medium.cache_key, medium.pixel_values)
                    held.append(medium.cache_key)
            media = [replace(medium, pixel_values=None) for medium in sample.media]
            lean.append(replace(sample, media=media))
    except BaseException:
        for key in held:
            store.release([key])
        raise
    return lean
