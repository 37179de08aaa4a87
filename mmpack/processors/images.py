"""An image as the caller has it (Pillow, array, bytes or path) to RGB8 pixels [h, w, 3] and what is known of it."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError, MmpackError, require
from mmpack.files import read_bounded, reading
from mmpack.processors.kinds import HEAD, brand

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow reads many more, some by running other programs
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# in Medium.metadata: format, frames, transparency and thumbnail, by which parity knows a picture again
PICTURE = "picture"
THUMBNAIL = 8  # cells per side
ORIENTATION = 0x0112  # EXIF tag
MAX_FILE_BYTES = 2**28  # of an encoded picture


def rgb_pixels(
    image: Any, root: Path | None, where: str, convert: Callable[[Image], np.ndarray] | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """uint8 [h, w, 3], and the Medium fields that describe the origin.

    Bytes and paths (opened only below `root`) are turned upright by their EXIF tag, as transformers' own loader does;
    an image in memory is taken as it is. `convert` makes RGB of a Pillow image; if not given, Pillow does. Refused are
    grey levels that don't fit into 8 bits, and files of several frames or pages, of which none was chosen.
    Raises: ArgumentError, MissingExtraError without Pillow.
    """
    pillow = require("PIL.Image", "hf", where)
    known: dict[str, Any] = {}
    if isinstance(image, (str, Path)):
        image, known["source"] = file_below(image, root, where)
    if isinstance(image, (bytes, bytearray)):
        known["file_hash"] = hashlib.sha256(image).hexdigest()
        opened = decode(bytes(image), where)
        with _decoding(where, ArgumentError):
            known |= _origin(opened, where)
            image = require("PIL.ImageOps", "hf", where).exif_transpose(opened)
    if isinstance(image, pillow.Image):
        with _decoding(where, ArgumentError):
            known = _origin(image, where) | known
            pixels = to_rgb(image, where, convert)
    elif hasattr(image, "__array__"):
        pixels = np.asarray(image)
    else:
        raise ArgumentError(
            f"{where}: {type(image).__name__} is not an image. "
            "Fix: pass a Pillow image, uint8 [h, w, 3], bytes, or a path below media_root"
        )
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ArgumentError(
            f"{where}: the image has dtype {pixels.dtype} and shape {list(pixels.shape)}, "
            "expected uint8 [h, w, 3]. Fix: pass RGB pixels of 8 bits, or a Pillow image"
        )
    known["size"] = (pixels.shape[1], pixels.shape[0])
    as_is = isinstance(image, pillow.Image) and image.mode == "RGB" and image.size == known["size"]
    seen = image if as_is and "transparency" not in image.info else pillow.fromarray(pixels)
    known["metadata"] = {PICTURE: known.pop(PICTURE, {}) | {"thumbnail": _thumbnail(seen)}}
    return pixels, {k: v for k, v in known.items() if v is not None}


def to_rgb(
    image: Image, where: str, convert: Callable[[Image], np.ndarray] | None = None
) -> np.ndarray:
    """uint8 [h, w, 3] of a Pillow image. Raises: ArgumentError for grey levels that 8 bits don't hold."""
    pixels = np.asarray(image.convert("RGB")) if convert is None else convert(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        levels = np.asarray(image)
        if pixels.ndim != 3 or not np.array_equal(pixels[..., 0], levels):
            raise ArgumentError(
                f"{where}: the picture has mode {image.mode} with grey levels from {levels.min():g} to {levels.max():g}"
                ", and its conversion to RGB would clip or round them. Fix: scale it to 8 bits first, for engine and "
                "trainer alike, such as Image.fromarray((np.asarray(image) / 257).astype(np.uint8)) for 16 bits"
            )
    return pixels


def decode(data: bytes, where: str, error: type[MmpackError] = ArgumentError) -> Image:
    """The first picture of an encoded file, in its own mode, as it lies in the file.

    Raises: `error`, one line that begins with `where`; MissingExtraError without Pillow.
    """
    with _decoding(where, error):
        picture = _opened(io.BytesIO(data), where, error)
        picture.load()
    return picture


def _opened(file: IO[bytes], where: str, error: type[MmpackError] = ArgumentError) -> Image:
    pillow = require("PIL.Image", "hf", where)
    pillow.init()
    readable = [kind for kind in IMAGE_FORMATS if kind in pillow.OPEN]  # AVIF: from Pillow 11.3 on
    kind = brand(file.read(HEAD))
    file.seek(0)
    if kind == "heic" or (kind == "avif" and "AVIF" not in readable):
        fix = "pip install 'pillow>=11.3'"
        if kind == "heic":
            fix = "pass a PNG or JPEG, or with pillow-heif the Pillow image (register_heif_opener(), then Image.open)"
        raise error(f"{where} is {kind.upper()}, which this Pillow can't decode. Fix: {fix}")
    picture: Image = pillow.open(file, formats=readable)
    return picture


@contextmanager
def _decoding(where: str, error: type[MmpackError]) -> Iterator[None]:
    """Whatever Pillow raises over a broken or huge file becomes `error`."""
    pillow = require("PIL.Image", "hf", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            yield
    except MmpackError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise error(
            f"{where} has more than {pillow.MAX_IMAGE_PIXELS} pixels, Pillow's limit. Fix: pass a smaller picture"
        ) from None
    except pillow.UnidentifiedImageError:  # its message has an address in memory
        raise error(
            f"{where} can't be decoded (unknown format). Fix: pass a whole {', '.join(IMAGE_FORMATS)} file"
        ) from None
    except (
        OSError, SyntaxError, ValueError, RuntimeError, EOFError, LookupError, TypeError, struct.error
    ) as e:  # fmt: skip
        why = " ".join(str(e).split())[:200]
        raise error(
            f"{where} can't be decoded ({why}). Fix: pass a whole {', '.join(IMAGE_FORMATS)} file"
        ) from None


def _origin(image: Image, where: str) -> dict[str, Any]:
    turned = image.getexif().get(ORIENTATION)
    about: dict[str, Any] = {} if image.format is None else {"format": image.format}
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        about |= {"frames": frames, "frame": image.tell()}
        # further pictures of an MPO are views of the first: its depth, its gain map, a preview
        if not image.tell() and image.format != "MPO":
            raise ArgumentError(
                f"{where}: the {image.format} holds {frames} frames or pages, and the model would see the first only. "
                "Fix: pass one, such as image.copy() after image.seek(k), each as a picture, or all as a video: "
                '(frames, {"fps": …})'
            )
    return {
        PICTURE: about | _transparency(image),
        "decoded_size": image.size,
        "mode": image.mode,
        "exif_orientation": turned if isinstance(turned, int) and 0 <= turned < 256 else None,
    }


def _transparency(image: Image) -> dict[str, Any]:
    """`transparent`, whether any pixel is, of a picture that has an alpha channel; if so, `flattened`: its thumbnails
    over white and black, and with the channel dropped."""
    named = "transparency" in image.info and image.mode in ("1", "L", "P", "RGB")
    if not named and not image.mode.endswith(("A", "a")):
        return {}
    whole = image.convert("RGBA") if named else image
    if whole.getchannel(whole.mode[-1]).getextrema()[0] == 255:
        return {"transparent": False}
    whole = whole.convert("LA" if whole.mode == "La" else "RGBA").convert("RGBA")
    flattened = {"dropped": _thumbnail(whole.convert("RGB"))}
    for name, level in (("white", 255), ("black", 0)):
        ground = whole.copy()
        ground.paste((level, level, level, 255), (0, 0, *whole.size))
        ground.alpha_composite(whole)
        flattened[name] = _thumbnail(ground.convert("RGB"))
    return {"transparent": True, "flattened": flattened}


def _thumbnail(image: Image) -> str:
    """Base64 of uint8 [8, 8, 3]: the mean colour of each cell."""
    box = require("PIL.Image", "hf", "thumbnail").Resampling.BOX
    # in two steps: faster
    across, down = (max(1, side // (32 * THUMBNAIL)) for side in image.size)
    small = image.reduce((across, down)).resize((THUMBNAIL, THUMBNAIL), box)
    return base64.b64encode(small.tobytes()).decode()


def file_below(path: str | Path, root: Path | None, where: str) -> tuple[bytes, str]:
    """The bytes of the picture `root / path`, and that path from the root on, links resolved.

    Its size and its header are looked at before it is read. Raises: ArgumentError, MissingExtraError without Pillow.
    """
    whole, inside = path_below(path, root, where)

    def look(file: IO[bytes]) -> None:
        with _decoding(where, ArgumentError):
            _opened(file, where)

    try:
        return read_bounded(whole, MAX_FILE_BYTES, look), inside
    except OSError as error:
        raise _unreadable(path, error, where) from None


def path_below(path: str | Path, root: Path | None, where: str) -> tuple[Path, str]:
    """`root / path`, a file that is there, and that path from the root on, links resolved. Raises: ArgumentError."""
    shown = ascii(str(path)[:80])
    if _URL.match(str(path)):
        raise ArgumentError(
            f"{where}: {shown} is a URL, and mmpack fetches nothing. Fix: pass the bytes, or a path below media_root"
        )
    if root is None:
        raise ArgumentError(
            f"{where}: {shown} is a path, but there is no media_root. "
            "Fix: set wrap_processor(…, media_root=DIR), or pass the file's bytes"
        )
    try:
        top = root.resolve()
        whole = (top / path).resolve()
        inside = not Path(path).is_absolute() and whole.is_relative_to(top)
        there = inside and whole.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; links in a circle
        raise _unreadable(path, error, where) from None
    if not inside:
        raise ArgumentError(
            f"{where}: {shown} is not below media_root. Fix: pass a path relative to media_root, inside it"
        )
    if not there:
        raise ArgumentError(
            f"{where}: {shown} is not a file below media_root. Fix: check the path"
        ) from FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    reading(whole, "a medium's file")
    return whole, whole.relative_to(top).as_posix()


def _unreadable(path: str | Path, error: Exception, where: str) -> ArgumentError:
    why = " ".join(str(error).split())[:200]
    return ArgumentError(
        f"{where}: {str(path)[:80]!a} can't be read ({why}). Fix: check the path and its permissions"
    )
