"""Modes, orientation, paths and broken files, against transformers given the same picture."""

import io
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.processors.images import IMAGE_FORMATS, decode

pytestmark = pytest.mark.adapter


def encoded(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def in_mode(mode):
    """A picture with transparent and opaque parts, of 120×90."""
    ramp = Image.linear_gradient("L").resize((120, 90))
    rgba = Image.merge("RGBA", (ramp, ramp.rotate(180), ramp.transpose(0), ramp))
    if mode == "P+transparency":
        image = rgba.convert("RGB").convert("P")
        image.info["transparency"] = 3
        return image
    return rgba.convert("L").convert("LA") if mode == "LA" else rgba.convert(mode)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "P+transparency", "RGB", "RGBA", "CMYK", "YCbCr"]
)
def test_modes(processor, hf, mode):
    image = in_mode(mode)
    medium = processor.medium(image)
    expected = hf.image_processor(images=[image], return_tensors="np")
    assert np.array_equal(medium.pixel_values, expected["pixel_values"])
    assert medium.grid_thw == tuple(expected["image_grid_thw"][0])
    assert medium.mode == mode[:5].split("+")[0]
    assert medium.size == medium.decoded_size == (120, 90)


@pytest.mark.parametrize("orientation", [1, 2, 5, 6, 8])
def test_files_are_turned_upright(processor, hf, tmp_path, orientation):
    image = in_mode("RGB")
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data)
    upright = load_image(str(tmp_path / "a.jpg"))
    below = mp.wrap_processor(hf, media_root=tmp_path)
    for medium in (processor.medium(data), below.medium("a.jpg")):
        assert medium.size == upright.size == ((120, 90) if orientation < 5 else (90, 120))
        assert medium.decoded_size == (120, 90)
        assert medium.exif_orientation == orientation
        expected = hf.image_processor(images=[upright], return_tensors="np")["pixel_values"]
        assert np.array_equal(medium.pixel_values, expected)
    in_memory = processor.medium(Image.open(io.BytesIO(data)))  # is taken as it lies
    assert (in_memory.size, in_memory.exif_orientation) == ((120, 90), orientation)


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_formats(processor, kind):
    data = encoded(in_mode("RGB"), kind)
    pixels, known = processor.rgb_pixels(data)
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert len(known["file_hash"]) == 64


def test_file_and_picture_agree_on_transparency(processor):
    image = in_mode("RGBA")
    assert processor.medium(encoded(image)).content_hash == processor.medium(image).content_hash
    cut = Image.open(io.BytesIO(encoded(image)[:150]))
    with pytest.raises(ArgumentError, match="can't be decoded"):
        processor.medium(cut)


def refuses(processor, item, match, kind=None):
    with pytest.raises(ArgumentError, match=match) as caught:
        processor.medium(item, "processor: media[0]", kind)
    text = str(caught.value)
    assert text.startswith("processor: media[0]") and "Fix: " in text and "\n" not in text


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (b"", "can't be decoded"),
        (encoded(in_mode("RGB"))[:150], "can't be decoded"),
        (encoded(in_mode("RGB"), "PPM"), "can't be decoded"),
        (np.zeros((4, 4), np.uint8), r"shape \[4, 4\]"),
        (np.zeros((3, 40, 40), np.uint8), r"shape \[3, 40, 40\]"),
        (np.zeros((2, 40, 40, 3), np.uint8), "frames alone have no times"),
        (np.zeros((40, 40, 3), np.float32), "dtype float32"),
        (Image.new("RGB", (0, 9)), r"shape \[9, 0, 3\]"),
        (np.zeros((2, 1000, 3), np.uint8), "refuses an image of 1000×2"),
        (7, "int is not an image"),
        ("a.png", "there is no media_root"),
        ("https://a.example/a.png", "is a URL"),
    ],
)
def test_what_is_no_picture(processor, item, match):
    refuses(processor, item, match)


RAMP = np.linspace(0, 65_535, 120 * 90).reshape(90, 120)
DEEP = {
    "I;16": Image.fromarray(RAMP.astype("<u2")),
    "I;16B": Image.fromarray(RAMP.astype(">u2")),
    "I": Image.fromarray(RAMP.astype("<i4")),
    "F": Image.fromarray(RAMP.astype("<f4")),
    "F from 0 to 1": Image.fromarray((RAMP / 65_535).astype("<f4")),
}


@pytest.mark.parametrize("name", DEEP)
def test_grey_levels_beyond_8_bits(processor, name):
    """Pillow, and so transformers and the engines, clip them to white and black."""
    image = DEEP[name]
    assert image.mode == name.split()[0]
    match = r"has mode .* would clip or round them\. Fix: scale it to 8 bits"
    refuses(processor, image, match)
    refuses(processor, encoded(image, "TIFF"), match)
    if name.startswith("I;16"):
        refuses(processor, encoded(image, "PNG"), match)
    refuses(processor, ([image] * 4, {"fps": 2.0}), match)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_several_frames(processor, hf, tmp_path, kind):
    frames = [Image.new("RGB", (64, 64), (50 * k, 0, 99)) for k in range(5)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    (tmp_path / "a").write_bytes(data)
    match = rf"the {kind} holds 5 frames or pages, .* Fix: pass one, such as image.copy\(\)"
    for item in (data, Image.open(io.BytesIO(data))):
        refuses(processor, item, match)
    refuses(mp.wrap_processor(hf, media_root=tmp_path), "a", match)
    chosen = Image.open(io.BytesIO(data))
    assert processor.medium(chosen.copy()).metadata["picture"].get("frames") is None
    chosen.seek(3)
    about = processor.medium(chosen).metadata["picture"]
    assert (about["frames"], about["frame"]) == (5, 3)
    pixels, _ = processor.rgb_pixels(chosen)
    assert np.array_equal(pixels, np.asarray(chosen.convert("RGB")))
    assert abs(pixels[0, 0, 0] - 150.0) < 4


def test_photos_with_a_second_picture(processor):
    """As phones write them: a depth, a gain map, a preview."""
    photo = in_mode("RGB")
    data = encoded(photo, "MPO", save_all=True, append_images=[photo.convert("L").resize((30, 20))])
    medium = processor.medium(data)
    about = medium.metadata["picture"]
    assert (about["format"], about["frames"], about["frame"]) == ("MPO", 2, 0)
    assert medium.size == (120, 90)


@pytest.mark.parametrize("brands", [b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0mif1heic"])
def test_heic_is_named(processor, brands):
    data = (8 + len(brands)).to_bytes(4) + b"ftyp" + brands + bytes(200)
    for kind in (None, "image"):
        refuses(processor, data, "is HEIC, .* Fix: pass a PNG or JPEG, or with pillow-heif", kind)


def test_a_pillow_without_avif(processor, monkeypatch):
    data = encoded(in_mode("RGB"), "AVIF")
    assert processor.medium(data, kind="image").metadata["picture"]["format"] == "AVIF"
    monkeypatch.delitem(Image.OPEN, "AVIF")
    refuses(processor, data, r"is AVIF, .* Fix: pip install 'pillow>=11.3'")


# Pillow warns above its limit, and refuses above twice
@pytest.mark.parametrize("factor", [1.5, 3])
def test_bombs(processor, monkeypatch, factor):
    data = encoded(Image.new("RGB", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(10_000 / factor))
    refuses(processor, data, "more than .* pixels")


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_damaged_files(kind):
    image = in_mode("RGB")
    exif = image.getexif()
    exif[0x0112] = 6
    whole = encoded(image, kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}))
    rng = np.random.default_rng(0)
    for _ in range(25):
        data = bytearray(whole)
        for at in rng.integers(0, min(len(data), 400), 3):
            data[at] = rng.integers(256)
        try:
            decode(bytes(data), "here")
        except ArgumentError as error:
            assert str(error).startswith("here ") and "\n" not in str(error)


def test_paths(hf, tmp_path):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    data = encoded(in_mode("RGB"))
    (root / "sub" / "a.png").write_bytes(data)
    (tmp_path / "out.png").write_bytes(data)
    os.symlink(tmp_path / "out.png", root / "escape.png")
    os.symlink(root / "sub" / "a.png", root / "link.png")
    os.symlink(root / "loop.png", root / "loop.png")
    processor = mp.wrap_processor(hf, media_root=root)
    for good in ("sub/a.png", "sub/../sub/a.png", "link.png"):
        assert processor.medium(good).source == "sub/a.png"
    for bad in ("escape.png", "../out.png", str(root / "sub" / "a.png"), str(tmp_path / "out.png")):
        refuses(processor, bad, "not below media_root")
    for bad in ("none.png", "sub", ""):
        refuses(processor, bad, "not a file below media_root")
    for bad in ("a\0b.png", "loop.png", "x" * 5000, "a\nb.png"):
        refuses(processor, bad, "can't be read|not a file below")


def test_a_huge_file_is_not_read(hf, tmp_path):
    processor = mp.wrap_processor(hf, media_root=tmp_path)
    whole = encoded(in_mode("RGB"))
    header = bytearray(whole[:33])
    header[16:24] = struct.pack(">II", 60_000, 60_000)
    header[29:33] = struct.pack(">I", zlib.crc32(header[12:29]))
    tracemalloc.start()
    for size, head, match in (
        (2**31, b"", "has 2147483648 bytes, more than 268435456"),
        (2 * 10**8, b"", "unknown format"),
        (2 * 10**8, bytes(header) + whole[33:], "more than .* pixels"),
    ):
        path = tmp_path / "huge.png"
        path.write_bytes(head)
        os.truncate(path, size)
        refuses(processor, "huge.png", match)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_thumbnails_of_a_picture_and_of_its_pixels_are_one(processor, mode):
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (300, 700, 3), np.uint8)
    ).convert(mode)
    pixels, known = processor.rgb_pixels(image)
    _, again = processor.rgb_pixels(pixels)
    assert known["metadata"]["picture"]["thumbnail"] == again["metadata"]["picture"]["thumbnail"]
