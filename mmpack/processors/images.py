"""An image as the caller hands it in (Pillow, array, bytes or path) to RGB8 pixels [h, w, 3] and what is known of it."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmpack.errors import ArgumentError

ORIENTATION = 0x0112  # EXIF tag


def rgb_pixels(image: Any, root: Path | None, where: str) -> tuple[np.ndarray, dict[str, Any]]:
    """uint8 [h, w, 3], and the Medium fields that describe the origin.

    A path is opened only below `root` and turned upright by its EXIF tag, as transformers' own loader does;
    an image in memory is taken as it is. Raises: ArgumentError.
    """
    known: dict[str, Any] = {}
    if isinstance(image, (str, Path)):
        path = _below(Path(image), root, where)
        known["source"] = str(image)
        image = path.read_bytes()
    if isinstance(image, (bytes, bytearray)):
        known["file_hash"] = hashlib.sha256(image).hexdigest()
        opened = _decode(bytes(image), where)
        known |= {"decoded_size": opened.size, "mode": opened.mode}
        known["exif_orientation"] = opened.getexif().get(ORIENTATION)
        image = ImageOps.exif_transpose(opened)
    if isinstance(image, Image.Image):
        known.setdefault("decoded_size", image.size)
        known.setdefault("mode", image.mode)
        known.setdefault("exif_orientation", image.getexif().get(ORIENTATION))
        pixels = np.asarray(image.convert("RGB"))
    else:
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ArgumentError(
                f"{where}: an image array has dtype {pixels.dtype} and shape {list(pixels.shape)}, "
                "expected uint8 [h, w, 3]. Fix: pass RGB pixels, or a Pillow image"
            )
    known["size"] = (pixels.shape[1], pixels.shape[0])
    return pixels, {k: v for k, v in known.items() if v is not None}


def _decode(data: bytes, where: str) -> Image.Image:
    try:
        opened = Image.open(io.BytesIO(data))
        opened.load()
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ArgumentError(
            f"{where}: the image can't be decoded ({error}). Fix: check the file"
        ) from None
    return opened


def _below(path: Path, root: Path | None, where: str) -> Path:
    if root is None:
        raise ArgumentError(
            f"{where}: {str(path)!r} is a path, and no media_root was given. "
            "Fix: wrap_processor(…, media_root=DIR), or pass the image itself"
        )
    whole = (root / path).resolve()
    if not whole.is_relative_to(root.resolve()):
        raise ArgumentError(f"{where}: {str(path)!r} lies outside media_root. Fix: move it below")
    if not whole.is_file():
        raise ArgumentError(f"{where}: {str(path)!r} is no file below media_root. Fix: check the path")
    return whole
