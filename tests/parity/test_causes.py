"""Each cause, in pairs of samples to one of which its mechanism, and nothing else, was applied."""

import copy

import numpy as np
import pytest
from support.planting.episodes import (
    END,
    IMAGE,
    PROCESSOR,
    START,
    decode,
    episode,
    finish,
    look,
    other,
    settings,
)
from support.samples import make_sample

import mmpack as mp
from mmpack import compare
from mmpack.families import get_family
from mmpack.schema.sample import RESPONSE_TEXT_KEY


def causes(left, right, **keywords):
    """All causes of a pair, first one first; checks that both directions name the same ones."""
    report = compare([left], [right], **keywords)
    assert not report.ok
    assert report.first == report.findings[0]
    back = compare([right], [left], **keywords)
    assert {f.cause for f in back.findings} == {f.cause for f in report.findings}
    return list(dict.fromkeys(f.cause for f in report.findings))


def finding(left, right, field, **keywords):
    return next(f for f in compare([left], [right], **keywords).findings if f.field == field)


def runs(sample):
    ids = sample.input_ids == IMAGE
    edges = np.flatnonzero(np.diff(ids.astype(int), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# ---- media -------------------------------------------------------------------------------------


def test_max_pixels():
    left = episode()
    right = episode(grid=(1, 4, 4), processor=settings(image={"max_pixels": 50176}))
    report = compare([left], [right])
    assert {f.cause for f in report.findings} == {"max_pixels"}
    assert [f.field for f in report.findings] == [
        "input_ids",
        "modality_spans",
        "position_ids",
        "media",
        "loss_spans",
        "processor",
    ]
    first = report.first
    assert (first.index, first.span) == (8, (4, 16))  # 12 image tokens against 4, from token 4
    assert "processor.image.max_pixels: rollout 1003520, train 50176" in first.evidence
    assert "12 placeholders" in first.left and "4 placeholders" in first.right
    assert causes(left, right) == ["max_pixels"]


@pytest.mark.adapter
def test_max_pixels_of_the_real_image_processor():
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (430, 610, 3), np.uint8))

    def side(max_pixels):
        size = {"shortest_edge": 3136, "longest_edge": max_pixels}
        out = Qwen2VLImageProcessorPil(size=size)(images=[picture], return_tensors="np")
        grid = tuple(int(n) for n in out["image_grid_thw"][0])
        return episode(grid=grid, processor=settings(image={"max_pixels": max_pixels}))

    assert causes(side(12845056), side(100352)) == ["max_pixels"]


def test_grids_differ_without_settings():
    left, right = episode(), episode(grid=(1, 4, 4))
    left.processor = right.processor = None
    left.processor_fingerprint = right.processor_fingerprint = None
    assert causes(left, right) == ["unknown"]
    assert "possible: max_pixels" in finding(left, right, "input_ids").evidence


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("height", (448, 224)),
        ("width", (448, 224)),
        ("min_patches", (1, 2)),
        ("max_patches", (12, 4)),
        ("crop_to_patches", (True, False)),
    ],
)
def test_limits_of_tiles_are_pixel_limits(name, values):
    tiles = {"height": 448, "width": 448, "crop_to_patches": True} | {name: values[0]}
    left, right = episode(), episode(grid=(1, 4, 4))
    for sample in (left, right):
        sample.processor = settings()
        sample.processor["image"] = dict(tiles)
    assert causes(left, right) == ["unknown"]
    assert "pixel limits are equal" in finding(left, right, "media").evidence
    right.processor["image"][name] = values[1]
    assert causes(left, right) == ["max_pixels"]
    assert f"processor.image.{name}: rollout" in finding(left, right, "media").evidence


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("mistral3", {"max_pixels": (1540, 1024)}, "size.longest_edge (rollout 1540, train 1024)"),
        ("gemma4", {"max_pixels": (645120, 161280)}, "max_soft_tokens (rollout 280, train 70)"),
        (
            "gemma3",
            {"do_pan_and_scan": (False, True)},
            "do_pan_and_scan (rollout False, train True)",
        ),
        ("gemma3", {"height": (896, 448)}, "size.height (rollout 896, train 448)"),
    ],
)
def test_limits_bear_the_names_that_users_set(family, values, said):
    sides = [chat(family), chat(family)]
    for k, side in enumerate(sides):
        side.processor["image"] = {name: both[k] for name, both in values.items()}
    (only,) = compare(sides[:1], sides[1:]).findings
    assert (only.cause, only.fix) == ("max_pixels", f"Set the same {said} on both sides.")


def test_grids_differ_under_equal_settings():
    assert causes(episode(), episode(grid=(1, 4, 4))) == ["unknown"]


def handed(sample, size, **fields):
    """Media[0] as it was handed to the processor in another size."""
    medium = sample.media[0]
    medium.size, medium.content_hash, medium.cache_key = size, "0" * 64, "1" * 64
    for name, value in fields.items():
        setattr(medium, name, value)
    return sample


def test_resize_twice():
    """28 x 1988 is what qwen-vl-utils makes of 13 x 2000."""
    left, right = episode(grid=(1, 2, 50)), handed(episode(grid=(1, 4, 72)), (13, 2000))
    left.media[0].size = (28, 1988)
    assert causes(left, right) == ["resize_twice"]
    assert "size: rollout [28, 1988], train [13, 2000]" in finding(left, right, "media").evidence


@pytest.mark.parametrize(
    "size",
    [
        (640, 640),  # padded to a square
        (616, 448),  # cut to a multiple of the factor, or resized to it
        (448, 336),  # of one shape: resized under unknown limits, or its middle cut out
        (601, 433),
    ],
)
def test_a_picture_that_may_have_been_cut_or_padded_is_unknown(size):
    left = episode()
    assert causes(left, handed(other(left), size)) == ["unknown"]
    found = finding(left, handed(other(left), size), "media").evidence
    assert "possible: resize_twice" in found


def seen(medium, thumbnail, **fields):
    medium.metadata = {"picture": {"thumbnail": thumbnail, **fields}}


def test_thumbnails_tell_a_resize_from_a_cut():
    left, right = episode(), handed(episode(), (448, 336))
    seen(left.media[0], look())
    seen(right.media[0], look())
    assert causes(left, right) == ["resize_twice"]
    seen(right.media[0], look(1))
    assert causes(left, right) == ["unknown"]
    found = finding(left, right, "media").evidence
    assert "thumbnails differ" in found and "possible" not in found


def test_another_picture_is_unknown():
    left, right = episode(), episode(grid=(1, 4, 4))
    right.media[0].size = right.media[0].decoded_size = (99, 77)
    right.media[0].content_hash = "0" * 64
    assert causes(left, right) == ["unknown"]


def test_exif_rotation():
    left, right = episode(grid=(1, 8, 6)), episode(grid=(1, 6, 8))
    right.media[0].content_hash, right.media[0].size = "0" * 64, (480, 640)
    assert causes(left, right) == ["unknown"]
    assert "possible: exif_rotation" in finding(left, right, "media").evidence
    left.media[0].exif_orientation = right.media[0].exif_orientation = 6
    assert causes(left, right) == ["exif_rotation"]
    square = other(left)
    square.media[0].content_hash, square.media[0].size = "0" * 64, (480, 640)
    square.media[0].cache_key = "1" * 64
    assert causes(left, square) == ["exif_rotation"]


def other_pixels(**fields):
    sample = episode()
    sample.media[0].content_hash, sample.media[0].cache_key = "0" * 64, "1" * 64
    for name, value in fields.items():
        setattr(sample.media[0], name, value)
    return sample


def test_alpha():
    left, right = episode(), other_pixels(mode="RGBA")
    left.media[0].mode = "RGBA"
    assert causes(left, right) == ["unknown"]
    assert finding(left, right, "media").evidence.endswith("possible: alpha")
    flat = {"white": look(), "black": look(1)}
    seen(left.media[0], look(), transparent=True, flattened=flat)
    seen(right.media[0], look(1), transparent=True, flattened=flat)
    assert causes(left, right) == ["alpha"]
    others = {"white": look(2), "black": look(3)}
    seen(right.media[0], look(2), transparent=True, flattened=others)  # another picture
    assert causes(left, right) == ["unknown"]
    for sample in (left, right):
        seen(sample.media[0], look(), transparent=False)  # 255 everywhere
    assert causes(left, right) == ["unknown"]
    assert "alpha" not in finding(left, right, "media").evidence


def test_jpeg_reencode():
    left, right = episode(), other_pixels(file_hash="e" * 64)
    assert causes(left, right) == ["unknown"]
    assert finding(left, right, "media").evidence.endswith("possible: jpeg_reencode")
    seen(left.media[0], look(), format="PNG")
    seen(right.media[0], look(), format="JPEG")
    assert causes(left, right) == ["jpeg_reencode"]
    seen(right.media[0], look(), format="PNG")  # lossless: the pixels would be the same
    assert causes(left, right) == ["unknown"]
    seen(right.media[0], look(1), format="JPEG")
    assert causes(left, right) == ["unknown"]
    left.media[0].mode, right.media[0].mode = "RGB", "L"
    seen(right.media[0], look(), format="JPEG")  # greyed
    assert causes(left, right) == ["unknown"]


def test_exif_rotation_where_both_sides_turned():
    left = handed(episode(), (480, 640), exif_orientation=6)
    right = handed(episode(), (480, 640), exif_orientation=6)
    right.media[0].content_hash, right.media[0].cache_key = "2" * 64, "3" * 64
    assert causes(left, right) == ["unknown"]
    assert "exif_rotation" not in finding(left, right, "media").evidence


def test_other_pixels_with_two_possible_causes_or_none():
    left = episode()
    left.media[0].mode = "RGBA"
    right = other_pixels(mode="RGBA", file_hash="e" * 64)
    assert causes(left, right) == ["unknown"]
    assert "possible: alpha, jpeg_reencode" in finding(left, right, "media").evidence
    assert causes(episode(), other_pixels()) == ["unknown"]


def stranger(left, index=0, **fields):
    """Media[index] as another picture: another name, file, content and key."""
    right = other(left)
    medium = right.media[index]
    medium.media_id, medium.file_hash = "another", "e" * 64
    medium.content_hash, medium.cache_key = "0" * 64, "1" * 64
    for name, value in fields.items():
        setattr(medium, name, value)
    return right


@pytest.mark.parametrize(
    ("was", "becomes", "possible"),
    [
        ({"exif_orientation": 6}, {"size": (480, 640), "exif_orientation": None}, "exif_rotation"),
        ({"exif_orientation": 6}, {"size": (480, 640)}, "exif_rotation"),
        ({}, {"size": (644, 476), "decoded_size": None}, "resize_twice"),
        ({}, {"size": (644, 476)}, "resize_twice"),  # decoded to one size by chance
    ],
)
def test_another_picture_is_never_named_for_what_one_picture_would_show(was, becomes, possible):
    left = episode()
    for name, value in was.items():
        setattr(left.media[0], name, value)
    right = stranger(left, **becomes)
    assert causes(left, right) == ["unknown"]
    found = finding(left, right, "media").evidence
    assert "may be another image" in found and possible in found.partition("possible: ")[2]
    named = other(right)
    named.media[0].media_id, named.media[0].file_hash = left.media[0].media_id, "f" * 64
    named.media[0].decoded_size = left.media[0].decoded_size
    assert causes(left, named) == [possible]
    named.media[0].media_id = "another"  # the file is the same
    assert causes(left, named) == [possible]


@pytest.mark.parametrize(
    ("fields", "cause"),
    [({"size": (644, 476)}, "resize_twice"), ({"size": (480, 640)}, "exif_rotation")],
)
def test_without_names_sizes_tell_one_decoded_size_that_was_handed_on_in_two(fields, cause):
    left = episode()
    left.media[0].media_id, left.media[0].exif_orientation = "image:" + "a" * 16, 6
    right = stranger(left, media_id="image:" + "0" * 16, file_hash=None, **fields)
    assert causes(left, right) == [cause]
    right.media[0].decoded_size = None
    assert causes(left, right) == ["unknown"]


def test_pictures_in_another_order():
    left = episode(grid=(1, 4, 4))
    for medium in left.media:
        medium.mode, medium.file_hash = "RGBA", medium.content_hash
    swapped = other(left)
    swapped.media.reverse()
    assert causes(left, swapped) == ["media_order"]
    shown = "train has the content of rollout's media[1] in place of media[0]"
    assert finding(left, swapped, "media").evidence == shown
    late = stranger(left, 1)
    late.media[0] = copy.deepcopy(left.media[1])
    assert causes(left, late) == ["media_order"]


def test_cache_key():
    left, right = episode(), episode()
    right.media[0].content_hash = "0" * 64
    assert "cache_key" in causes(left, right)
    within = episode(grid=(1, 4, 4))
    within.media[1].cache_key = within.media[0].cache_key
    assert "cache_key" in causes(within, other(within))


def drop(sample, keep_placeholders=False):
    """Lose media[0], with or without its tokens."""
    start, stop = runs(sample)[0]
    del sample.media[0]
    lost = 0
    if not keep_placeholders:
        lost = stop - start + 2
        sample.input_ids = np.delete(sample.input_ids, np.arange(start - 1, stop + 1))
    sample.modality_spans = sample.modality_spans[1:]
    for span in sample.modality_spans:
        span.media_index -= 1
    for span in [*sample.modality_spans, *sample.loss_spans, *sample.observation_spans]:
        span.start, span.stop = span.start - lost, span.stop - lost
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    return sample if keep_placeholders else finish(sample)


def test_dropped_image():
    assert causes(episode(), drop(episode())) == ["dropped_image"]
    assert "train lacks media[0]" in compare([episode()], [drop(episode())]).first.evidence


def test_dropped_image_whose_tokens_stay():
    assert causes(episode(), drop(episode(), keep_placeholders=True))[0] == "dropped_image"


def test_dropped_tokens_whose_image_stays():
    right = drop(episode())
    right.media.insert(0, copy.deepcopy(episode().media[0]))
    for span in right.modality_spans:
        span.media_index += 1
    assert causes(episode(), right)[0] == "dropped_image"


def test_other_media_are_no_dropped_image():
    right = drop(episode())
    right.media[0].content_hash, right.media[0].cache_key = "0" * 64, "1" * 64
    right.media[0].media_id = "another"
    assert causes(episode(), right)[0] == "unknown"


# ---- video -------------------------------------------------------------------------------------


def clip(grid=(3, 4, 4), **fields):
    sample = episode(video=grid)
    for name, value in fields.items():
        setattr(sample.media[0], name, value)
    return finish(sample)


def test_frame_sampling():
    assert causes(clip(), clip(grid=(4, 4, 4)))[0] == "frame_sampling"
    shifted = clip(frame_indices=np.arange(6) * 5 + 1)
    assert causes(clip(), shifted) == ["frame_sampling"]
    unrecorded = clip(grid=(4, 4, 4), frame_indices=None)
    assert causes(clip(), unrecorded) == ["unknown"]
    assert "possible: frame_sampling" in finding(clip(), unrecorded, "media").evidence


@pytest.mark.parametrize(
    "fields",
    [
        {"total_frames": 99},
        {"decoded_size": (9, 9)},
        {"file_hash": "e" * 64},
        {"media_id": "video"},
    ],
)
@pytest.mark.parametrize("cause", ["frame_sampling", "video_budget", "fps_missing"])
def test_another_video_is_unknown(cause, fields):
    changed = {
        "frame_sampling": {"frame_indices": np.arange(6) * 5 + 1},
        "video_budget": {"grid": (3, 8, 6)},
        "fps_missing": {"fps": None, "frame_timestamps": tuple((np.arange(6) * 5 / 24).tolist())},
    }[cause]
    assert causes(clip(), clip(**changed)) == [cause]
    if "file_hash" not in fields:  # which says that it is one video
        assert cause in causes(clip(), clip(**changed, **fields)) or "media_id" in fields
        fields = fields | {"file_hash": None}
    right = clip(**changed, **fields)
    assert causes(clip(), right) == ["unknown"]
    found = finding(clip(), right, "media").evidence
    assert "another video" in found and found.endswith(f"possible: {cause}")


def test_video_budget():
    assert causes(clip(), clip(grid=(3, 8, 6))) == ["video_budget"]
    right = clip(grid=(3, 8, 6))
    right.processor = settings(video={"max_pixels": 2 * 602112})
    assert "max_pixels" in causes(clip(), right)


def test_frames_resized_before_the_processor():
    def handed_frames(size, grid=(3, 4, 4), **fields):
        return clip(grid, size=size, content_hash="0" * 64, cache_key="1" * 64, **fields)

    left = clip(grid=(3, 8, 6))
    for grid in ((3, 4, 4), (3, 8, 6)):
        assert causes(left, handed_frames((320, 240), grid)) == ["resize_twice"]
    cut = handed_frames((480, 480))  # to a square, or the middle of it
    assert causes(left, cut) == ["unknown"]
    assert "possible: resize_twice" in finding(left, cut, "media").evidence
    unknown = clip()
    unknown.media[0].size = None
    assert causes(left, unknown) == ["unknown"]
    assert "possible: video_budget, resize_twice" in finding(left, unknown, "media").evidence
    limited = handed_frames((320, 240))
    limited.processor = settings(video={"max_pixels": 2 * 602112})
    assert causes(left, limited) == ["max_pixels", "unknown"]
    for sample, policy in ((left, "qwen_vl_utils"), (limited, "qwen_vl_utils")):
        sample.processor["video"]["sampling"] = {"policy": policy}
        sample.media[0].decoded_size = (1280, 960)  # the loader resized both, by their limits
    assert causes(left, limited) == ["max_pixels"]


@pytest.mark.parametrize("fps", [29.97, 30000 / 1001])
def test_two_rates_of_one_file(fps):
    assert causes(clip(fps=fps), clip(fps=30.0)) == ["video_metadata"]
    assert compare([clip(fps=30000 / 1001)], [clip(fps=29.97)]).ok
    left, right = clip(fps=fps), clip(fps=30.0)
    right.media[0].file_hash = None
    assert causes(left, right) == ["unknown"]


@pytest.mark.parametrize("seconds", [1.5, 0.4, 2.4, 4.0])
def test_half_of_the_seconds(seconds):
    left = clip((4, 8, 8), second_per_grid_ts=seconds)
    for passed in (seconds / 2, seconds * 2):
        right = finish(other(left), second_per_grid_ts=[passed])
        assert causes(left, right) == ["second_per_grid_ts"]
        assert f"train {passed * 2:g}" in compare([left], [right]).first.evidence


@pytest.mark.parametrize("kind", ["video", "medium"])
@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_position_more_behind_each(kind, more, behind):
    left = clip((4, 8, 8))
    right = other(left)
    right.position_ids = left.position_ids.copy()
    for span in left.modality_spans:
        if kind in (span.modality, "medium"):
            right.position_ids[:, span.stop + behind :] += more
    assert causes(left, right) == ["position_rule"]
    evidence = compare([left], [right]).first.evidence
    assert evidence.endswith(f"train follows `grid` with {more:+d} behind each {kind}")
    right.position_ids[:, -1] += 1  # no rule counts so
    assert causes(left, right) == ["unknown"]


def test_fps_missing():
    indices = np.arange(6) * 5
    right = clip(fps=None, frame_timestamps=tuple((indices / 24).tolist()))
    assert causes(clip(), other(right)) == ["fps_missing"]
    right.media[0].fps = 24.0
    assert causes(clip(), other(right)) == ["fps_missing"]
    right.media[0].frame_timestamps = tuple((indices / 30).tolist())
    assert causes(clip(), other(right)) == ["video_metadata"]  # of one file
    right.media[0].file_hash = None
    assert causes(clip(), right) == ["unknown"]


def test_second_per_grid_ts():
    assert causes(clip(), clip(second_per_grid_ts=1.0)) == ["second_per_grid_ts"]
    left = clip(second_per_grid_ts=1.6)
    not_passed_on = finish(other(left), second_per_grid_ts=None)
    assert causes(left, not_passed_on) == ["second_per_grid_ts"]
    code_default = finish(other(left), tokens_per_second=4.0)
    assert causes(left, code_default) == ["second_per_grid_ts"]
    assert "rollout 3.2, train 6.4" in finding(left, code_default, "position_ids").evidence


def test_position_rule():
    left = clip(second_per_grid_ts=3.0)
    right = finish(other(left), rule="max")
    assert causes(left, right) == ["position_rule"]
    both = finish(other(left), rule="max", second_per_grid_ts=None)
    assert set(causes(left, both)) == {"position_rule", "second_per_grid_ts"}


def test_position_rule_of_whole_seconds():
    left = clip(second_per_grid_ts=3.5)
    right = finish(other(left), rule="grid_int")
    assert causes(left, right) == ["position_rule"]
    found = finding(left, right, "position_ids")
    sentence = (
        f"positions differ from token {found.index} on: rollout follows `grid`, train follows"
    )
    assert found.evidence == f"{sentence} `grid_int`"
    # 1.6 cut to 1 is what a train side without the seconds has, too
    left = clip(second_per_grid_ts=1.6)
    right = finish(other(left), rule="grid_int")
    found = finding(left, right, "position_ids")
    assert found.cause == "second_per_grid_ts"
    assert (
        f"position_rule is possible too: positions differ from token {found.index} on: rollout follows"
        in found.evidence
    )


# ---- expansion ---------------------------------------------------------------------------------


def stretch(sample, count, start=None):
    """Media[0]'s run cut or grown to `count` placeholders, spans counted along, positions as they were."""
    start, stop = runs(sample)[0]
    ids = sample.input_ids
    more = count - (stop - start)
    sample.input_ids = np.concatenate([ids[:start], np.full(count, IMAGE), ids[stop:]])
    sample.modality_spans[0].stop += more
    for span in [*sample.modality_spans[1:], *sample.loss_spans, *sample.observation_spans]:
        span.start, span.stop = span.start + more, span.stop + more
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    sample.position_ids = None
    return sample


@pytest.mark.parametrize("count", [144, 24])
def test_double_expansion(count):
    right = stretch(episode(), count)
    assert causes(episode(), right) == ["double_expansion"]
    assert f"a run of {count} placeholders in train" in compare([episode()], [right]).first.evidence


def test_double_expansion_on_both_sides():
    broken = stretch(episode(), 144)
    assert causes(broken, other(broken))[0] == "double_expansion"


def test_run_that_is_no_multiple_is_unknown():
    assert causes(episode(), stretch(episode(), 13)) == ["unknown"]


def test_not_expanded():
    assert causes(episode(), stretch(episode(), 1)) == ["not_expanded"]


def test_truncated_medium():
    left = episode()
    cut = runs(left)[1][0] + 2
    right = other(
        left,
        input_ids=left.input_ids[:cut],
        position_ids=left.position_ids[:, :cut],
        attention_mask=left.attention_mask[:cut],
        loss_spans=left.loss_spans[:1],
    )
    right.modality_spans[1].stop = cut
    assert "truncated_medium" in causes(left, right)


# ---- around the conversation -------------------------------------------------------------------

PAD = 151643


def around(sample, before=(), after=(), drop=0):
    """The sample with ids put before and after its own, of which the first `drop` are left out."""
    out = copy.deepcopy(sample)
    out.input_ids = np.concatenate([before, sample.input_ids[drop:], after]).astype(np.int64)
    for span in (*out.modality_spans, *out.loss_spans, *(out.observation_spans or [])):
        span.start, span.stop = (at + len(before) - drop for at in (span.start, span.stop))
    out.position_ids = None
    out.attention_mask = None if out.attention_mask is None else np.ones(len(out), np.int8)
    return out


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ((PAD,) * 3, (), "3 on the left (id 151643)"),
        ((PAD,), (), "1 on the left"),
        ((), (PAD,) * 2, "2 on the right"),
        ((PAD,) * 7, (PAD,) * 5, "7 on the left (id 151643), 5 on the right (id 151643)"),
        ((), (END,) * 6, "6 on the right (id 151645)"),  # a tokenizer whose pad is its eos
        ((0,) * 9, (), "9 on the left (id 0)"),
    ],
)
def test_padding_in_ids(before, after, where):
    left = episode(system=(START, 8, 11, 12))
    right = around(left, before, after)
    assert causes(left, right) == ["padding_in_ids"]
    first = compare([left], [right]).first
    assert f"rollout pad ids: none; train pad ids: {where}" in first.evidence
    assert first.index == (0 if before else len(left))
    padded = around(left, (PAD,) * 2, (PAD,) * 3)
    assert set(causes(padded, right)) == {"padding_in_ids"}
    assert compare([right], [copy.deepcopy(right)]).ok  # equal ids


def test_padding_in_ids_beside_other_causes():
    left = episode(system=(START, 8, 11, 12))
    cut = episode(system=(START, 8, 11, 12), second=(710, 711))
    cut.finish_reason = left.finish_reason = "length"
    assert set(causes(left, around(cut, (PAD,) * 4, (PAD,) * 4))) == {"padding_in_ids", "truncated"}
    left.finish_reason = "stop"
    stopless = episode(system=(START, 8, 11, 12), second=(710, 711, 712))
    assert set(causes(left, around(stopless, (), (PAD,) * 4))) == {"padding_in_ids", "stop_token"}
    scored = around(left, (), (PAD,) * 4)
    scored.loss_spans[1].stop += 4  # the loss covers them too
    assert causes(left, scored) == ["padding_in_ids"]
    middle = episode(system=(START, 8, 11, 12), asked=(21, 22, 23, 24, *(PAD,) * 5))
    asked = episode(system=(START, 8, 11, 12))
    assert causes(asked, middle) == ["padding_in_ids"]  # prompt and response padded by themselves
    one = around(left, (), (PAD,))
    assert causes(left, one) == ["unknown"]
    assert "possible: padding_in_ids, stop_token" in compare([left], [one]).first.evidence


FIRST = {  # ids before the first turn, then the turn's
    "gemma3": ((2,), (105, 2364, 107)),
    "gemma4": ((2,), (105, 2364, 107)),
    "mistral3": ((1,), (3,)),
    "glm4v": ((151331, 151333), (151336, 198)),
    "kimi_k25": ((163584,), (163587, 2482, 163601)),
}


def chat(family, system=(), asked=(21, 22), response=(700, 701)):
    """First ids, a system turn if there is one, a question, an answer."""
    first, user = FIRST[family]
    opens = {"mistral3": (4,), "glm4v": (151337, 198)}.get(family, (user[0], 9, 10))
    opens = (163588, 9, 10) if family == "kimi_k25" else opens
    parts = [("text", (*first, *system, *user, *asked)), ("text", opens), ("response", response, 0)]
    sample = make_sample(parts, family=family, finish_reason="stop")
    sample.processor = {"family": family, "chat_template": "sha256:" + "1" * 64}
    return sample


@pytest.mark.parametrize("family", FIRST)
def test_bos(family):
    left = chat(family)
    first = FIRST[family][0]
    right = around(left, drop=len(first))
    assert causes(left, right) == ["bos"]
    assert causes(left, around(left, first)) == ["bos"]  # twice
    pads = around(left, (get_family(family).pad_token_id,) * 3)
    assert causes(right, pads) == ["padding_in_ids", "bos"]
    shown = compare([left], [right]).first
    assert (shown.index, shown.span) == (0, (0, len(first))) and shown.right == "no ids"
    another = chat(family, response=(700, 705))
    assert set(causes(right, another)) == {"bos", "unknown"}


@pytest.mark.parametrize("family", FIRST)
def test_a_turn_that_is_missing_at_the_beginning_is_no_truncation(family):
    """A system prompt of its own turn, by one template or by two."""
    system = {"mistral3": (17, 31, 32, 18), "glm4v": (151335, 198, 31, 32)}.get(family)
    system = system or ({"kimi_k25": 163594}.get(family, 105), 8, 107, 31, 32, 106)
    left, right = chat(family, system=system), chat(family)
    assert causes(left, right) == ["chat_template"]
    for sample in (left, right):  # of Kimi's kind, with nothing before the turns
        sample.input_ids = sample.input_ids[len(FIRST[family][0]) :]
        for span in sample.loss_spans:
            span.start, span.stop = (at - len(FIRST[family][0]) for at in (span.start, span.stop))
    assert causes(left, right) == ["chat_template"]
    left.processor["chat_template"] = "sha256:" + "2" * 64
    assert causes(left, right) == ["chat_template"]


@pytest.mark.parametrize("family", FIRST)
def test_a_cut_that_takes_bos_with_it_is_a_truncation(family):
    left = chat(family)
    drop = len(FIRST[family][0]) + len(FIRST[family][1]) + 1  # within the question
    assert causes(left, around(left, drop=drop)) == ["truncated"]
    first, user = FIRST[family]
    again = chat(family, system=(*user, 31, 32))  # another user's turn before
    right = around(again, drop=len(first) + len(user) + 2)
    right.processor["chat_template"] = "sha256:" + "2" * 64
    assert causes(again, right) == ["unknown"]  # a whole turn: cut off, or never written
    assert "possible: chat_template, truncated" in compare([again], [right]).first.evidence


# ---- text --------------------------------------------------------------------------------------


def test_chat_template_by_its_hash():
    right = episode(system=(11, 99, 98, 13), processor=settings(chat_template="sha256:" + "2" * 64))
    report = compare([episode()], [right])
    assert {f.cause for f in report.findings} == {"chat_template"}
    assert (report.first.field, report.first.index, report.first.span) == ("input_ids", 1, (1, 2))


def test_text_behind_the_last_token_of_the_other_side():
    left = episode(system=(START, 8, 11, END, START, 7, 13), asked=(21, END, START, 9))
    left.attention_mask = left.position_ids = None
    right = copy.deepcopy(left)
    right.input_ids = np.append(right.input_ids, 198)  # a line break that no engine writes
    for report in (compare([left], [right]), compare([right], [left])):
        assert report.first.field == "input_ids" and report.first.cause == "unknown"


def test_system_prompt_under_one_template():
    """The first turn, if its role comes once, or its lack; no words of the user's."""
    system, user, assistant = 8, 7, 9  # roles

    def asked(*head):
        return episode(system=(START, *head), asked=(21, END, START, assistant))

    left = asked(system, 11, 12, END, START, user, 13)
    for head in ((system, 99, END, START, user, 13), (user, 13), (system, END, START, user, 13)):
        assert causes(left, asked(*head)) == ["chat_template"]
    edited = asked(system, 11, 12, END, START, user, 99)
    assert causes(left, edited) == ["unknown"]
    assert "possible: chat_template" in compare([left], [edited]).first.evidence
    assert causes(asked(user, 11), asked(user, 12)) == ["unknown"]
    turns = (END, START, assistant, 22, END, START, user, 13)
    assert causes(asked(user, 11, *turns), asked(user, 12, *turns)) == ["unknown"]
    two = (END, START, user, 13)  # the user's turns follow each other
    assert causes(asked(user, 11, *two), asked(user, 12, *two)) == ["unknown"]
    assert causes(episode(), episode(system=(13,))) == ["unknown"]  # no turn is known


def test_text_that_differs_after_the_media_is_unknown():
    right = episode(tool=(31, 99, 33))
    assert causes(episode(), right) == ["unknown"]
    assert "possible: chat_template" in compare([episode()], [right]).first.evidence


def test_text_without_template_hash_is_unknown():
    right = episode(system=(13,))
    right.processor["chat_template"] = None
    assert causes(episode(), right) == ["unknown"]


def test_retokenized_response():
    right = episode(response=(701, 704, END))
    report = compare([episode()], [right])
    assert {f.cause for f in report.findings} == {"retokenized_response"}
    assert report.first.span == (21, 23)
    longer = episode(response=(701, 702, 703, END))
    assert causes(episode(), longer) == ["retokenized_response"]


def test_retokenized_response_by_decoding():
    left, right = episode(), episode(response=(701, 702, 703, END))
    for sample in (left, right):
        sample.metadata = {}
    assert causes(left, right) == ["unknown"]
    assert "possible: retokenized_response" in compare([left], [right]).first.evidence
    assert causes(left, right, decode=decode) == ["retokenized_response"]
    another = episode(response=(701, 703, END))
    assert causes(left, another, decode=decode) == ["unknown"]


@pytest.mark.parametrize("text", ["", "x\ufffd"])
def test_text_that_says_nothing_of_ids_is_no_retokenized_response(text):
    left, right = episode(), episode(response=(701, 704, END))
    assert causes(left, right, decode=lambda ids: text) == ["unknown"]
    assert "can't say how" in compare([left], [right], decode=lambda ids: text).first.evidence


def test_ids_that_decode_to_nothing_are_no_retokenized_response():
    left, right = episode(response=(900, 700, 901, END)), episode(response=(902, 700, 903, END))

    def skips(ids):
        return decode([i for i in ids if i < 900])

    assert causes(left, right, decode=skips) == ["unknown"]


@pytest.mark.parametrize("second", [(710, 711), (710,)])
def test_a_cut_response_that_ended_by_stop_may_also_have_met_a_stop_string(second):
    """`finish_reason` length leaves no rival; stop, or none recorded, does, and the evidence says so."""
    left, right = episode(), episode(second=second)
    for reasons, hedged in (
        (("stop", "stop"), True),
        ((None, None), True),
        (("length", "stop"), False),
    ):
        left.finish_reason, right.finish_reason = reasons
        report = compare([left], [right])
        assert report.first.cause == "truncated"
        hedge = "cut at a limit, or by a stop string; possible: truncated, stop_token"
        assert report.first.evidence.endswith(hedge) == hedged


def test_ids_that_one_side_lacks_are_no_retokenized_response():
    """The text's hash was carried along with what was cut."""
    left, right = episode(), episode(second=(710, 711))
    right.metadata = copy.deepcopy(left.metadata)
    assert causes(left, right) == ["truncated"]
    assert causes(left, right, decode=lambda ids: "one text") == ["truncated"]
    inside = episode(response=(700, END))
    inside.metadata = copy.deepcopy(left.metadata)
    assert causes(left, inside) == ["unknown"]
    stopped = other(episode(second=(710, 711, 712)), metadata=copy.deepcopy(left.metadata))
    assert causes(left, stopped) == ["stop_token"]


def test_another_response_is_unknown():
    report = compare([episode()], [episode(response=(703, 703, END))])
    assert report.first.cause == "unknown"
    assert "possible: retokenized_response, rewritten_response" in report.first.evidence
    found = compare([episode()], [episode(response=(703, 703, END))], decode=decode)
    assert "possible" not in found.first.evidence and found.first.cause == "unknown"


def test_stop_token():
    left, right = episode(), episode(second=(710, 711, 712))
    assert causes(left, right) == ["stop_token"]
    between_turns = episode(response=(700, 703))
    assert causes(left, between_turns) == ["stop_token"]
    left.finish_reason = right.finish_reason = "length"
    assert causes(left, right) == ["unknown"]


def test_a_last_word_is_no_stop_token():
    left, right = episode(second=(710, 711, 712)), episode(second=(710, 711))
    assert causes(left, right) == ["unknown"]
    assert "not a special token" in compare([left], [right]).first.evidence
    for sample in (left, right):
        del sample.processor["tokenizer"]["special_ids"]
    assert causes(left, right) == ["stop_token"]


def test_sampled_placeholder():
    left = episode(response=(700, IMAGE, 703, END))
    assert causes(left, other(left)) == ["sampled_placeholder"]
    stripped = episode(response=(700, 703, END))
    assert causes(left, stripped) == ["sampled_placeholder"]
    assert "token 22 of rollout" in compare([left], [stripped]).first.evidence


def test_sampled_placeholder_that_was_expanded():
    """Re-processing gave the sampled placeholder a picture's tokens."""
    left = episode(response=(700, IMAGE, 703, END))
    right = episode(response=(700, *[IMAGE] * 12, 703, END))
    assert causes(left, right)[0] == "sampled_placeholder"


def test_sampled_placeholder_that_was_cut_out_of_the_loss():
    left = episode(response=(700, IMAGE, 703, END))
    right = other(left)
    first = right.loss_spans[0]
    head, tail = copy.deepcopy(first), copy.deepcopy(first)
    head.stop, tail.start = first.start + 1, first.start + 2
    right.loss_spans = [head, tail, right.loss_spans[1]]
    assert causes(left, right)[0] == "sampled_placeholder"
    assert causes(right, other(right))[0] == "sampled_placeholder"


# ---- positions ---------------------------------------------------------------------------------


def test_padding_positions():
    left = episode()
    right = other(left, position_ids=left.position_ids + 7, metadata={"padding": [7, 0]})
    report = compare([left], [right])
    assert [f.cause for f in report.findings] == ["padding_positions"]
    assert (report.first.index, report.first.span) == (0, (0, len(left)))
    assert causes(left, right) == ["padding_positions"]


@pytest.mark.parametrize("padding", [None, [0, 7], [9, 0]])
def test_an_offset_that_is_no_padding_is_unknown(padding):
    """Positions that go on from another row, or count from another number."""
    left = episode()
    right = other(left, position_ids=left.position_ids + 7)
    right.metadata |= {} if padding is None else {"padding": padding}
    assert causes(left, right) == ["unknown"]
    assert finding(left, right, "position_ids").evidence.endswith("possible: padding_positions")


def padded(sample, positions, pad):
    """The sample as a left-padded record is read."""
    record = sample.to_dict(numpy=True) | {
        "input_ids": [0] * pad + sample.input_ids.tolist(),
        "attention_mask": [0] * pad + [1] * len(sample),
        "position_ids": positions.tolist(),
    }
    return mp.Sample.from_dict(record, "record")


def test_padding_positions_of_a_rectangle():
    left = episode()
    whole = np.concatenate([np.ones((3, 5), dtype=int), left.position_ids + 5], axis=1)
    right = padded(left, whole, 5)
    assert causes(left, right) == ["padding_positions"]
    assert "train [5, 0]" in finding(left, right, "position_ids").evidence
    counted = np.broadcast_to(np.arange(len(left) + 5), (3, len(left) + 5))
    assert causes(left, padded(left, counted, 5)) == ["padding_positions"]


@pytest.mark.adapter
def test_padding_positions_of_get_rope_index_without_a_mask():
    import torch
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    left, pad = episode(), 9
    ids = torch.tensor([[0] * pad + left.input_ids.tolist()])
    grids = torch.tensor([m.grid_thw for m in left.media])
    positions, _ = model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids
    )
    right = padded(left, positions[:, 0].numpy(), pad)
    assert causes(left, right) == ["padding_positions"]


def test_positions_without_a_rule_are_unknown():
    left = episode()
    right = other(left, position_ids=np.broadcast_to(np.arange(len(left)), (3, len(left))))
    assert causes(left, right) == ["unknown"]


# ---- loss, rewards, settings -------------------------------------------------------------------


def spans(sample, *bounds):
    out = other(sample)
    for span, (start, stop) in zip(out.loss_spans, bounds, strict=False):
        span.start, span.stop = start, stop
    out.loss_spans = out.loss_spans[: len(bounds)]
    return out


def test_loss_mask_shift():
    left = episode()
    (a, b), (c, d) = [(s.start, s.stop) for s in left.loss_spans]
    for moved in (
        spans(left, (a - 1, b - 1), (c, d)),
        spans(left, (a + 1, b + 1), (c, d)),
        spans(left, (a, b - 1), (c, d - 1)),  # misses the end of each turn
        spans(left, (a, b + 1), (c, d)),
        spans(left, (a, b + 3), (c, d)),  # covers the tool's words
        spans(left, (a, d)),  # covers the tool's words and its picture
    ):
        assert "loss_mask_shift" in causes(left, moved)
        assert compare([left], [moved]).first.cause == "loss_mask_shift"


def test_a_turn_missing_from_the_loss():
    left = episode()
    for k, kept in enumerate((left.loss_spans[1:], left.loss_spans[:1])):
        right = other(left, loss_spans=kept)
        assert causes(left, right) == ["turn_without_loss"]
        evidence = f"response {k + 1} of rollout has no loss in train"
        assert compare([left], [right]).first.evidence == evidence


def test_a_hole_within_a_response_is_no_shift():
    left = episode(response=(700, 703, 704, 705, END))
    first, second = left.loss_spans
    ends = ((first.start, first.start + 2), (first.start + 3, first.stop))
    right = other(left, loss_spans=[*(mp.LossSpan(a, b, turn=0) for a, b in ends), second])
    assert causes(left, right) == ["unknown"]
    evidence = compare([left], [right]).first.evidence
    assert evidence.startswith("train's loss leaves out 1 token within a response; possible: ")


def test_loss_spans_cut_otherwise_are_equal():
    left, right = episode(), episode()
    whole = right.loss_spans[0]
    head = copy.deepcopy(whole)
    head.stop = whole.start = whole.start + 1
    right.loss_spans.insert(0, head)
    assert compare([left], [right]).ok


def test_empty_response():
    left = episode()
    left.loss_spans[1].stop = left.loss_spans[1].start
    left.rewards = [mp.Score("exact", 1.0, {"turn": 1})]
    assert causes(left, other(left)) == ["empty_response"]


def test_logprob_kind():
    logprobs = np.full(episode().num_loss_tokens, -0.5, dtype=np.float32)
    sampling = {"temperature": 0.5, "top_p": 1.0, "logprobs": "processed"}
    left = other(episode(), rollout_logprobs=logprobs, sampling=sampling)
    raw = other(left, sampling={**sampling, "logprobs": "raw"})
    hotter = other(left, sampling={**sampling, "temperature": 1.0})
    assert compare([left], [other(left)]).ok
    assert causes(left, raw) == ["logprob_kind"]
    assert causes(left, hotter) == ["sampling"]
    assert "temperature 0.5 in rollout" in finding(left, hotter, "sampling").evidence
    both_raw = {**sampling, "logprobs": "raw", "temperature": 1.0}
    assert compare([raw], [other(left, sampling=both_raw)]).ok


@pytest.mark.parametrize(
    ("changed", "cause", "path"),
    [
        ({"image": {"max_pixels": 1}}, "max_pixels", "processor.image.max_pixels"),
        ({"position_rule": "max"}, "position_rule", "processor.position_rule"),
        ({"tokens_per_second": 4.0}, "second_per_grid_ts", "processor.tokens_per_second"),
        ({"image": {"merge_size": 3}}, "model_family", "processor.image.merge_size"),
        ({"tokenizer": {"vocab_sha256": "0"}}, "unknown", "processor.tokenizer.vocab_sha256"),
    ],
)
def test_settings(changed, cause, path):
    right = other(episode(), processor=settings(**changed))
    assert causes(episode(), right) == [cause]
    assert path in finding(episode(), right, "processor").evidence


def test_settings_that_one_side_did_not_record():
    right = episode()
    del right.processor["image"]["max_pixels"]
    right.processor["video"] = None
    report = compare([episode()], [right])
    assert report.ok
    assert set(report.not_compared) >= {"processor.image.max_pixels", "processor.video.merge_size"}
    assert not compare([episode()], [right], require=("processor",)).ok


def test_fingerprints_without_settings():
    left, right = episode(), episode()
    left.processor = right.processor = None
    assert compare([left], [right], require=("processor",)).ok
    right.processor_fingerprint = "sha256:" + "0" * 64
    assert causes(left, right) == ["unknown"]


# ---- several -----------------------------------------------------------------------------------


def test_two_causes_in_one_sample():
    smaller = settings(image={"max_pixels": 50176}, chat_template="sha256:" + "2" * 64)
    right = episode(system=(99,), grid=(1, 4, 4), processor=smaller)
    assert causes(episode(), right) == ["chat_template", "max_pixels"]
    right = finish(other(clip(second_per_grid_ts=3.0)), rule="max")
    right.position_ids, right.metadata["padding"] = right.position_ids + 4, [4, 0]
    assert set(causes(clip(second_per_grid_ts=3.0), right)) == {
        "position_rule",
        "padding_positions",
    }
    turn = (21, END, START, 9)
    left = episode(system=(START, 8, 11, START, 7), asked=turn)
    system = (START, 8, 99, START, 7)
    moved = episode(system=system, asked=turn)
    moved.loss_spans[0].start += 1
    assert set(causes(left, moved)) == {"chat_template", "loss_mask_shift"}
    encoded = episode(system=system, response=(701, 704, END), asked=turn)
    assert set(causes(left, encoded)) == {"chat_template", "retokenized_response"}


def test_known_and_unknown_in_one_sample():
    right = episode(
        grid=(1, 4, 4), tool=(31, 99, 33), processor=settings(image={"max_pixels": 50176})
    )
    assert causes(episode(), right) == ["max_pixels", "unknown"]


def test_every_broken_rule_is_a_finding():
    left = episode()
    left.media[0].num_tokens = 5
    report = compare([left], [other(left)])
    assert any("MM108 in both sides" in f.evidence for f in report.findings)
    right = other(left, media=episode().media)
    (one,) = [f for f in compare([left], [right]).findings if "MM108" in f.evidence]
    assert one.fix == "Set it to t·(h/m)·(w/m), where m is the merge size."
    assert one.left.startswith("says num_tokens 5") and one.right == "keeps this rule"
    assert RESPONSE_TEXT_KEY in episode().metadata and PROCESSOR["position_rule"] == "grid"
