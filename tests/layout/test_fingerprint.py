"""Hashes against hashlib by hand, as design.md and the docstrings spell them."""

import hashlib
import struct

import numpy as np

from mmpack.layout.fingerprint import cache_key, content_hash


def test_cache_key_by_hand():
    content, grid, settings = "ab" * 32, (1, 2**33, 6), {"min_pixels": 5}
    key = hashlib.sha256(
        b"mmpack.media.1\0"
        + b"\xab" * 32
        + struct.pack("<qqq", *grid)
        + hashlib.sha256(b'{"min_pixels":5}').digest()
    ).hexdigest()
    assert cache_key(content, grid, settings) == key
    others = [
        cache_key("ac" * 32, grid, settings),
        cache_key(content, (1, 6, 2**33), settings),
        cache_key(content, grid, {"min_pixels": 6}),
        cache_key(content, grid, None),
    ]
    assert len({key, *others}) == 5


def test_content_hash_tells_apart():
    pixels = np.arange(2 * 6 * 3, dtype=np.uint8).reshape(2, 6, 3)
    changed = pixels.copy()
    changed[1, 5, 2] ^= 1
    hashes = [
        content_hash("image", pixels),
        content_hash("video", pixels),
        content_hash("image", pixels.reshape(3, 4, 3)),
        content_hash("image", pixels.reshape(6, 2, 3)),
        content_hash("video", pixels.reshape(1, 2, 6, 3)),
        content_hash("image", changed),
    ]
    assert len(set(hashes)) == len(hashes)
    assert content_hash("image", np.asfortranarray(pixels)) == hashes[0]
    view = np.repeat(pixels, 2, axis=1)[:, ::2]
    assert content_hash("image", view) == hashes[0]
    by_hand = hashlib.sha256(b"image\x002x6\x00" + pixels.tobytes()).hexdigest()
    assert hashes[0] == by_hand
