"""Two causes in one sample: both are named, for every pair of causes; or it is written here why one hides the other."""

from itertools import combinations

import pytest
from support.planting.episodes import decode
from support.planting.mechanisms import MECHANISMS, broken_by

import mmpack as mp
from mmpack.parity.causes.audio import CAUSES as OF_AUDIO
from mmpack.parity.fixes import FIXES, UNKNOWN

# test_two_audio_causes.py, test_told_apart.py
OF_SOME_FAMILIES = {"view_settings", "audio_in_video"}
ACROSS_SAMPLES = {"sample_order", "merged_turns"}
NO_POSITIONS = "ids that contradict their grids have no positions"
# (cause that hides, cause that is hidden): why
HIDES = {
    ("exif_rotation", "alpha"): "a turned picture's pixels differ, whatever its background is",
    ("dropped_image", "cache_key"): "the picture under the wrong key is the one that is dropped",
    ("fps_missing", "position_rule"): "at 24 fps the video is so short that both rules agree",
    ("video_rotation", "frame_pixels"): "turned frames have other pixels, whatever the decoder is",
    ("video_reader", "video_metadata"): "two readers count as they count",
    ("video_reader", "frame_sampling"): "two readers' figures take other frames",
    ("video_reader", "fps_missing"): "a rate that was read was not assumed",
    ("frame_sampling", "frame_pixels"): "other frames have other pixels, whatever the decoder is",
    ("not_expanded", "double_expansion"): "a run is too long or too short, not both",
    ("truncated_medium", "stop_token"): "the response is cut off",
    ("truncated", "stop_token"): "the response is cut off",
    ("truncated_medium", "dropped_image"): "the dropped picture lies behind the cut",
    ("truncated_medium", "truncated"): "a cut through a medium is a cut",
    ("empty_response", "truncated"): "a response without a token can't be cut",
    ("empty_response", "stop_token"): "a response without a token has no stop token",
    ("logprob_kind", "sampling"): "raw logprobs have no settings to compare",
    ("padding_in_ids", "padding_positions"): "padding before the ids shifts their positions",
    **{
        (cause, other): NO_POSITIONS
        for cause in (
            "double_expansion",
            "not_expanded",
            "truncated_medium",
            "sampled_placeholder",
        )
        for other in ("position_rule", "second_per_grid_ts", "padding_positions")
    },
}
HIDES |= {
    (cause, other): "Qwen3-VL, whose videos are in the text, has one position rule, of no seconds"
    for cause in ("timestamp_rounding", "video_markers")
    for other in ("position_rule", "second_per_grid_ts")
}
HIDES |= {
    ("media_order", cause): "what was done to a picture is not seen in another one's place"
    for cause in ("exif_rotation", "alpha", "jpeg_reencode", "resize_twice", "cache_key")
}
HIDES |= {
    ("dropped_image", "media_order"): "there is one picture left",
    ("turn_without_loss", "loss_mask_shift"): "the turn whose edge moved has no loss",
}
HIDES |= {
    (cause, "timestamp_rounding"): "frames of other seconds have other timestamps"
    for cause in ("fps_missing", "video_reader", "frame_sampling")
}
BRINGS = {"truncated_medium": {"truncated"}}
# what one difference can't distinguish is listed as possible
EITHER = {
    frozenset({"retokenized_response", "rewritten_response"}): "possible: retokenized_response",
    frozenset({"retokenized_response", "stop_token"}): "possible: retokenized_response",
    # the recorded hash is of the whole responses' ids
    **{
        frozenset({"retokenized_response", other}): "possible: retokenized_response"
        for other in ("truncated", "truncated_medium", "loss_mask_shift")
    },
    frozenset({"retokenized_response", "turn_without_loss"}): "retokenized_response, rewritten",
    frozenset({"rewritten_response", "turn_without_loss"}): "loss_mask_shift, turn_without_loss",
}


def test_every_cause_has_a_mechanism_and_none_is_no_cause():
    # the others: test_two_audio_causes.py; the episode's family begins with no id of its own
    elsewhere = {*OF_AUDIO, *OF_SOME_FAMILIES, *ACROSS_SAMPLES, "bos"}
    assert set(MECHANISMS) == set(FIXES) - {UNKNOWN, *elsewhere}
    assert mp.compare(*([s] for s in broken_by())).ok


@pytest.mark.parametrize("cause", MECHANISMS)
def test_one(cause):
    assert set(mp.compare(*([s] for s in broken_by(cause))).causes) == {cause} | BRINGS.get(
        cause, set()
    )


@pytest.mark.parametrize(("one", "two"), list(combinations(MECHANISMS, 2)))
def test_two(one, two):
    left, right = broken_by(one, two)
    report = mp.compare([left], [right])
    found = set(report.causes)
    hidden = {b for a, b in HIDES if {a, b} == {one, two}}
    if frozenset({one, two}) in EITHER:
        assert UNKNOWN in found
        assert any(EITHER[frozenset({one, two})] in f.evidence for f in report.findings)
    else:
        brought = BRINGS.get(one, set()) | BRINGS.get(two, set())
        assert found == ({one, two} - hidden) | brought
    assert set(mp.compare([right], [left]).causes) == found


def test_a_tokenizer_distinguishes_turns():
    left, right = broken_by("retokenized_response", "stop_token")
    report = mp.compare([left], [right], decode=decode)
    assert set(report.causes) == {"retokenized_response", "stop_token"}
