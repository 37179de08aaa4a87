"""Causes of some families, and what looks like another cause: views, sound, rows, ends and hashes of responses."""

import copy

import numpy as np
import pytest
from PIL import Image
from support.kits import get_kit
from support.kits.samples import sample_of
from support.planting.episodes import END, START, decode, episode, finish, other
from support.planting.world import cut, ids_of, pictures, recorder, side, upstream
from support.replicas.chat_templates import MINICPM
from support.samples import make_sample

import mmpack as mp
from mmpack.parity.fixes import UNKNOWN


def causes(left, right, **keywords):
    """Of one direction; the other has the same."""
    found, back = (
        mp.compare([a], [b], **keywords).causes for a, b in ((left, right), (right, left))
    )
    assert set(found) == set(back)
    return set(found)


def evidence(left, right):
    return " | ".join(f.evidence for f in mp.compare([left], [right]).findings)


# ---- pictures in views ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def viewed():
    transformers = pytest.importorskip("transformers")
    if not get_kit("minicpmv4_6").available:
        pytest.skip("this transformers has no MiniCPM-V 4.6")
    from support.replicas.minicpm_processor import minicpm_tokenizer

    tokenizer = minicpm_tokenizer()
    drawn = np.random.default_rng(0)
    sizes = ((100, 150), (60, 40), (130, 70))  # four slices, none, two
    images = [Image.fromarray(drawn.integers(0, 255, (*s, 3), np.uint8)) for s in sizes]

    def make(shown=images, **settings):
        made = mp.wrap_processor(
            tokenizer=tokenizer,
            image_processor=transformers.MiniCPMV4_6ImageProcessorPil(
                **{"scale_resolution": 64, "max_slice_nums": 4} | settings
            ),
            family="minicpmv4_6",
            chat_template=MINICPM,
        )
        parts = [{"type": "image", "image": image} for image in shown]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
        return made(chat, response_ids=[5, 6, 7], sample_id="s")

    make.images = images
    return make


@pytest.mark.adapter
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{"max_slice_nums": 2}, {"max_slice_nums": 1}, {"scale_resolution": 96}, {"slice_mode": False}],
)
def test_other_views(viewed, settings, recorded):
    left, right = viewed(), viewed(**settings)
    for sample in () if recorded else (left, right):
        sample.processor = sample.processor_fingerprint = None
    assert causes(left, right) == {"view_settings"}


@pytest.mark.adapter
def test_views_and_what_else_differs(viewed):
    left, images = viewed(), viewed.images
    assert causes(left, viewed(use_image_id=False)) == {"view_settings"}  # the number in the text
    line = "text outside the loss spans differs"  # the template's, between pictures
    for settings, more in (({}, set()), ({"max_slice_nums": 2}, {"view_settings"})):
        fewer = viewed(images[:2], **settings)
        assert causes(left, fewer) == {"dropped_image", UNKNOWN} | more
        unknown = [f for f in mp.compare([left], [fewer]).findings if f.cause == UNKNOWN]
        assert all(f.evidence.startswith(line) for f in unknown)
    small = [*images[:2], images[2].resize((90, 170))]
    found = causes(left, viewed(small))  # no setting differs, but the picture that was cut
    assert found == {UNKNOWN} and "possible: view_settings" in evidence(left, viewed(small))


# ---- sound, rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
@pytest.mark.parametrize("frames", [260, 60])  # of sound: some chunks, one
def test_sound_among_frames_or_apart(family, frames):
    kit, shape = get_kit(family), (3, 4, 4)
    asked, told = ("text", np.array([3, 4])), ("loss", np.array([8, 9]))
    left = sample_of(kit, [asked, ("film", (shape, (frames, 1, 1)), "film"), told], "s")
    apart = [("video", shape, "film"), ("audio", (frames, 1, 1), "sound")]
    right = sample_of(kit, [asked, *apart, told], "s")
    for a, b in zip(left.media, right.media, strict=True):
        for name in ("media_id", "cache_key", "content_hash", "second_per_grid_ts"):
            setattr(b, name, getattr(a, name))
    assert causes(left, right) == {"audio_in_video"}


@pytest.mark.parametrize("spans", ["one", "per row"])
def test_rows_without_the_ids_between_them(spans):
    parts = [("text", [5, 6]), ("image", (1, 8, 6), "a"), ("text", [8]), ("response", [20, 21], 0)]
    left = make_sample(parts, family="mistral3")
    right, kept = (
        copy.deepcopy(left),
        left.input_ids != mp.families.get_family("mistral3").row_end_id,
    )
    place = np.cumsum([0, *kept])
    right.input_ids, right.position_ids, right.attention_mask = left.input_ids[kept], None, None
    for span in [*right.modality_spans, *right.loss_spans]:
        span.start, span.stop = int(place[span.start]), int(place[span.stop])
    if spans == "one":
        first, *_, last = right.modality_spans
        right.modality_spans = [mp.ModalitySpan(first.start, last.stop, "image", 0)]
    assert causes(left, right) == {UNKNOWN}
    assert "train lacks the ids between the rows, tiles or frames" in evidence(left, right)


def test_kimis_largest_height():
    left, right = episode(), episode(grid=(1, 4, 4))
    for sample, height in ((left, 896), (right, 448)):
        sample.processor["image"] = {"max_height": height, "patch_size": 14, "merge_size": 2}
        finish(sample)
    assert causes(left, right) == {"max_pixels"}


# ---- order -------------------------------------------------------------------------------------------


def test_turns_exchanged():
    first, second = [START, 8, 21, 22, END, 198], [START, 9, 31, 32, END, 198]
    last = [START, 8, 41]

    def talk(*turns, response=(700, 703, END)):
        parts = [
            ("text", [i for turn in turns for i in turn]),
            ("image", (1, 4, 4), "a"),
            ("response", response, 0),
        ]
        sample = make_sample(parts, finish_reason="stop")
        sample.processor = copy.deepcopy(episode().processor)
        return finish(sample)

    left = talk(first, second, last)
    assert causes(left, talk(second, first, last)) == {"turn_order"}
    assert causes(left, talk(second, first, last, response=(700, 703))) == {
        "turn_order",
        "stop_token",
    }
    assert "turn_order" not in causes(left, talk(first, last))
    assert "turn_order" not in causes(left, talk(first, [*second[:2], 99, *second[3:]], last))
    odd = [START, 9, 33, END, 198]  # one turn differs; that another is like it moves nothing
    assert causes(talk(odd, first, second, last), talk(second, first, second, last)) == {UNKNOWN}


def test_pictures_and_answers_exchanged():
    no_system = recorder(chat_template=upstream("qwen3_vl").chat_template)
    shown = pictures()

    def talk(order, answers=("A one.", "A two.")):
        chat = []
        for k in order:
            parts = [{"type": "image", "image": shown[k]}, {"type": "text", "text": f"{k}?"}]
            chat += [{"role": "user", "content": parts}]
            chat += [{"role": "assistant", "content": answers[k]}]
        return side(chat=[*chat, {"role": "user", "content": "And?"}], by=no_system, names=())

    assert causes(talk((0, 1)), talk((1, 0))) == {"turn_order"}
    assert causes(talk((0, 1)), talk((0, 1), ("A two.", "A one."))) == {"turn_order"}


def test_short_answers_sampled_anew_are_exchanged_by_chance():
    left, right = (
        side(response=f"{a}.<|im_end|>", second=f"{b}.<|im_end|>") for a, b in ("AB", "BA")
    )
    assert causes(left, right) == {UNKNOWN}
    one, two = (
        "x and y are the two angles at the base, so x is 48.",
        "y is what x is, and the third one is 84.",
    )
    left, right = (
        side(response=ids_of(f"{a}<|im_end|>"), second=f"{b}<|im_end|>")
        for a, b in ((one, two), (two, one))
    )
    assert causes(left, right) == {"turn_order"}


# ---- responses -----------------------------------------------------------------------------------------


def test_one_id_cut_at_a_limit():
    left = side(second=None)
    right = cut(left, 0, len(left) - 1)
    assert causes(left, right) == {"stop_token"}
    right.finish_reason = "length"
    assert causes(left, right) == {"truncated"}
    left.finish_reason = "length"
    assert causes(left, right) == {UNKNOWN}
    assert "possible: stop_token, truncated" in evidence(left, right)


def test_a_hash_carried_over_to_other_ids_is_no_evidence():
    left = side(second=None)
    right = side(response="It can't be known, so C.<|im_end|>", second=None)
    right.metadata = copy.deepcopy(left.metadata)
    assert causes(left, right) == {UNKNOWN}
    assert "possible: retokenized_response" in evidence(left, right)
    again = episode(response=(701, 704, END))  # the same text, its hash made anew
    assert causes(episode(), again) == {"retokenized_response"}
    again.metadata = {k: v.partition("/")[0] for k, v in again.metadata.items()}
    assert causes(episode(), again) == {UNKNOWN}  # of which ids it is, is not known
    assert causes(episode(), again, decode=decode) == {"retokenized_response"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 5), (3, 9), (0, 60)])
def test_files_and_memory_agree_on_masked_prompts(tmp_path, suffix, start, stop):
    left = side()
    right = other(left, attention_mask=left.attention_mask.copy())
    right.attention_mask[start:stop] = 0
    paths = [tmp_path / f"{name}.{suffix}" for name in ("rollout", "train")]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    report = mp.compare(*paths)
    assert report.to_json() == mp.compare([left], [right]).to_json()
    assert [f.field for f in report.findings] == ["attention_mask"]
    assert "MM306" in report.first.evidence


def test_padding_in_memory_is_padding():
    left = side()
    pads = [left.input_ids, left.attention_mask]
    right = other(left, position_ids=np.pad(left.position_ids, ((0, 0), (4, 0))))
    right.input_ids = np.pad(pads[0], (4, 0), constant_values=151643)
    right.attention_mask = np.pad(pads[1], (4, 0))
    assert mp.compare([left], [right]).ok
