"""The media cache is bounded in bytes; each distinct picture is processed once."""

import io

import numpy as np
import pytest

import mmpack as mp
from mmpack.processors.cache import MediaCache, Processed

pytestmark = pytest.mark.adapter


def entry(size):
    return Processed((1, 2, 2), np.zeros(size, dtype=np.uint8))


def test_least_recently_used_goes_first():
    cache = MediaCache(100)
    for key in "abc":
        cache.put(key, entry(30))
    assert cache.get("a") is not None
    cache.put("d", entry(30))
    assert cache.get("b") is None
    assert [cache.get(k) is not None for k in "acd"] == [True] * 3
    assert (len(cache), cache.held_bytes, cache.hits, cache.misses) == (3, 90, 4, 1)
    for _ in range(2):
        cache.put("e", entry(100))
    cache.put("f", entry(101))
    assert (len(cache), cache.held_bytes) == (1, 100)


@pytest.fixture
def counted(processor, monkeypatch):
    """The processor, and the list of sizes that its image processor was called with."""
    calls = []
    kind = type(processor.parts.image_processor)
    inner = kind.__call__

    def call(self, images, *args, **kwargs):
        calls.extend(image.size for image in images)
        return inner(self, images, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", call)
    return processor, calls


def user(*images):
    return [{"role": "user", "content": [{"type": "image", "image": i} for i in images]}]


def test_a_picture_in_any_form_is_processed_once(counted, picture, tmp_path, hf):
    _, calls = counted
    processor = mp.wrap_processor(hf, media_root=tmp_path, cache_bytes=2 * 48 * 1176 * 4)
    image = picture(0)
    data = io.BytesIO()
    image.save(data, "PNG")
    (tmp_path / "a.png").write_bytes(data.getvalue())
    forms = [image, np.asarray(image), data.getvalue(), "a.png", tmp_path.joinpath("a.png").name]
    samples = [processor(user(form), sample_id="s") for form in forms]
    assert calls == [(120, 90)]
    first = samples[0].media[0]
    for sample in samples:
        (medium,) = sample.media
        assert (medium.content_hash, medium.cache_key) == (first.content_hash, first.cache_key)
        assert np.array_equal(medium.pixel_values, first.pixel_values)
        assert (sample.input_ids == samples[0].input_ids).all()
    assert [s.media[0].source for s in samples] == [None, None, None, "a.png", "a.png"]
    repeated = processor(user(image, picture(1), np.asarray(image)), sample_id="s")
    assert len(calls) == 2
    assert [s.media_index for s in repeated.modality_spans] == [0, 1, 0]
    assert mp.validate(repeated) == []
    processor.medium(picture(2))  # of three pictures of one size it holds two
    assert len(processor.cache) == 2
    assert np.array_equal(processor.medium(image).pixel_values, first.pixel_values)


def test_other_pictures_and_settings_miss(counted, picture, make_hf):
    processor, calls = counted
    changed = np.asarray(picture(0)).copy()
    changed[0, 0, 0] ^= 1
    one, two = (processor.medium(i) for i in (picture(0), changed))
    assert len(calls) == 2
    assert one.cache_key != two.cache_key and not np.array_equal(one.pixel_values, two.pixel_values)
    processor.parts.image_processor = make_hf(max_pixels=4 * 28 * 28).image_processor
    three = processor.medium(picture(0))
    assert len(calls) == 3
    assert three.content_hash == one.content_hash and three.cache_key != one.cache_key
    assert three.grid_thw != one.grid_thw
