"""Causes of some families, and what looks like another cause: views, sound, rows, answers exchanged, masked prompts."""

import copy

import numpy as np
import pytest
from PIL import Image
from support.kits import get_kit
from support.kits.samples import sample_of
from support.planting.episodes import other
from support.planting.said import check
from support.planting.world import side
from support.replicas.chat_templates import MINICPM
from support.samples import make_sample

import mmpack as mp
from mmpack.parity.fixes import UNKNOWN


@pytest.fixture(scope="module")
def viewed():
    """Makes a sample of three pictures, which MiniCPM cuts into four slices, none and two."""
    transformers = pytest.importorskip("transformers")
    if not get_kit("minicpmv4_6").available:
        pytest.skip("this transformers has no MiniCPM-V 4.6")
    from support.replicas.minicpm_processor import minicpm_tokenizer

    drawn = np.random.default_rng(0)
    sizes = ((100, 150), (60, 40), (130, 70))
    images = [Image.fromarray(drawn.integers(0, 255, (*s, 3), np.uint8)) for s in sizes]
    tokenizer = minicpm_tokenizer()  # takes seconds to read

    def make(shown=images, **settings):
        settings = {"scale_resolution": 64, "max_slice_nums": 4} | settings
        made = mp.wrap_processor(
            tokenizer=tokenizer,
            image_processor=transformers.MiniCPMV4_6ImageProcessorPil(**settings),
            family="minicpmv4_6",
            chat_template=MINICPM,
        )
        parts = [{"type": "image", "image": image} for image in shown]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
        return made(chat, response_ids=[5, 6, 7], sample_id="s")

    make.images = images
    return make


@pytest.mark.adapter
def test_pictures_in_other_views(viewed):
    left, images = viewed(), viewed.images
    for settings in ({"max_slice_nums": 2}, {"scale_resolution": 96}, {"slice_mode": False}):
        right = viewed(**settings)
        check(left, right, "view_settings")
        bare = [other(s, processor=None, processor_fingerprint=None) for s in (left, right)]
        check(*bare, "view_settings")
    check(left, viewed(use_image_id=False), "view_settings")  # the number in the text
    line = "text outside the loss spans differs"  # the template's, between pictures
    for settings, more in (({}, set()), ({"max_slice_nums": 2}, {"view_settings"})):
        report = mp.compare([left], [viewed(images[:2], **settings)])
        assert set(report.causes) == {"dropped_image", UNKNOWN} | more
        unknown = [f for f in report.findings if f.cause == UNKNOWN]
        assert all(f.evidence.startswith(line) for f in unknown)
    small = viewed([*images[:2], images[2].resize((90, 170))])
    check(left, small, UNKNOWN, "possible: view_settings")  # no setting differs


@pytest.mark.parametrize(("family", "frames"), [("qwen2_5_omni", 260), ("qwen3_omni_moe", 60)])
def test_sound_among_frames_or_apart(family, frames):
    """Of some chunks, of one."""
    kit, shape = get_kit(family), (3, 4, 4)
    asked, told = ("text", np.array([3, 4])), ("loss", np.array([8, 9]))
    left = sample_of(kit, [asked, ("film", (shape, (frames, 1, 1)), "film"), told], "s")
    apart = [("video", shape, "film"), ("audio", (frames, 1, 1), "sound")]
    right = sample_of(kit, [asked, *apart, told], "s")
    for a, b in zip(left.media, right.media, strict=True):
        for name in ("media_id", "cache_key", "content_hash", "second_per_grid_ts"):
            setattr(b, name, getattr(a, name))
    check(left, right, "audio_in_video")


@pytest.mark.parametrize("one_span", [True, False])
def test_rows_without_the_ids_between_them(one_span):
    parts = [("text", [5, 6]), ("image", (1, 8, 6), "a"), ("text", [8]), ("response", [20, 21], 0)]
    left = make_sample(parts, family="mistral3")
    kept = left.input_ids != mp.families.get_family("mistral3").row_end_id
    place = np.cumsum([0, *kept])
    right = copy.deepcopy(left)
    right.input_ids, right.position_ids, right.attention_mask = left.input_ids[kept], None, None
    for span in [*right.modality_spans, *right.loss_spans]:
        span.start, span.stop = int(place[span.start]), int(place[span.stop])
    if one_span:
        first, *_, last = right.modality_spans
        right.modality_spans = [mp.schema.ModalitySpan(first.start, last.stop, "image", 0)]
    check(left, right, UNKNOWN, "train lacks the ids between the rows, tiles or frames")


LONG = ("x and y are the two angles at the base, so x is 48.", "y is what x is, and z is 84.")


@pytest.mark.parametrize(("answers", "cause"), [(("A.", "B."), UNKNOWN), (LONG, "turn_order")])
def test_short_answers_sampled_anew_are_exchanged_by_chance(answers, cause):
    left, right = (
        side(response=f"{one}<|im_end|>", second=f"{two}<|im_end|>")
        for one, two in (answers, answers[::-1])
    )
    check(left, right, cause)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 9)])
def test_files_and_memory_agree_on_masked_prompts(tmp_path, suffix, start, stop):
    left = side()
    right = other(left, attention_mask=left.attention_mask.copy())
    right.attention_mask[start:stop] = 0
    paths = [tmp_path / f"{name}.{suffix}" for name in ("rollout", "train")]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    report = check(left, right, UNKNOWN, "MM306")
    assert mp.compare(*paths).to_json() == report.to_json()
    assert [f.field for f in report.findings] == ["attention_mask"]


def test_padding_in_memory_is_padding():
    left = side()
    right = other(left, position_ids=np.pad(left.position_ids, ((0, 0), (4, 0))))
    right.input_ids = np.pad(left.input_ids, (4, 0), constant_values=151643)
    right.attention_mask = np.pad(left.attention_mask, (4, 0))
    check(left, right)
