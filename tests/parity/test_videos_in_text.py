"""Videos that lie in the text frame by frame, timestamps between them (Qwen3-VL): whose timestamps differ, and why."""

import numpy as np
import pytest
from support.samples import make_medium

import mmpack as mp
from mmpack.schema.spans import LossSpan, ModalitySpan

START, END, VIDEO = 151652, 151653, 151656


def video(stamps, fps=25.0, indices=(0, 1, 25, 26), times=None, system=(11, 12, 13)):
    """A prompt with a video, one span per temporal patch, each after its timestamp's ids; then a response."""
    ids, spans = list(system), []
    for frame, stamp in enumerate(stamps):
        ids += [*stamp, START]
        spans.append(ModalitySpan(len(ids), len(ids) + 4, "video", 0, frame))
        ids += [VIDEO] * 4 + [END]
    ids += [21, 22]
    response = LossSpan(len(ids), len(ids) + 3)
    ids += [31, 32, 33]
    medium = make_medium("clip", (len(stamps), 4, 4), "video", fps=fps)
    medium.frame_indices = np.array(indices)
    medium.frame_timestamps = tuple(i / (fps or 24) for i in indices) if times is None else times
    sample = mp.Sample(
        "s0",
        "g0",
        "qwen3_vl",
        np.array(ids),
        [medium],
        spans,
        [response],
        processor={"chat_template": "sha256:" + "1" * 64, "video": {"max_pixels": 1}},
    )
    sample.position_ids, _ = mp.mrope_positions(
        sample.input_ids, "qwen3_vl", video_grid_thw=[medium.grid_thw]
    )
    return sample


STAMPS = ([27, 15, 29], [27, 16, 29])


@pytest.mark.parametrize(
    "stamps",
    [
        ([27, 15, 29], [27, 17, 29]),  # the second
        ([27, 18, 29], [27, 16, 29]),  # the first
        ([27, 18, 18, 29], [27, 17, 29]),  # both, one longer
    ],
)
def test_a_missing_fps_moves_the_timestamps(stamps):
    left, right = video(STAMPS), video(stamps, fps=None)
    for a, b in ((left, right), (right, left)):
        report = mp.compare([a], [b])
        assert list(report.causes) == ["fps_missing"]
        assert any(f.field == "input_ids" for f in report.findings)


def test_other_frames_are_other_timestamps():
    left = video(STAMPS)
    right = video((*STAMPS, [27, 19, 29]), indices=(0, 1, 25, 26, 50, 51))
    assert list(mp.compare([left], [right]).causes) == ["frame_sampling"]
    assert list(mp.compare([right], [left]).causes) == ["frame_sampling"]


def written(*seconds):
    """<k.j seconds>, as Qwen's tokenizer writes it."""
    return [[27, 15 + int(s), 13, 15 + round(s * 10) % 10, 6486, 29] for s in seconds]


HALVES = {"fps": 2.0, "indices": (0, 1, 2, 3)}  # at 0.0, 0.5, 1.0, 1.5


@pytest.mark.parametrize(
    ("seconds", "place", "shown", "count"),
    [
        ((0.3, 1.2), 0, "0.2 s in rollout, 0.3 s in train", 1),  # rounded up
        ((0.2, 1.3), 1, "1.2 s in rollout, 1.3 s in train", 1),
        ((0.0, 1.0), 0, "0.2 s in rollout, 0.0 s in train", 2),  # the first frame's
    ],
)
@pytest.mark.parametrize("decode", [None, lambda ids: "".join(WORDS[i] for i in ids)])
def test_equal_frames_with_other_written_seconds(seconds, place, shown, count, decode):
    left, right = video(written(0.2, 1.2), **HALVES), video(written(*seconds), **HALVES)
    for a, b, back in ((left, right, False), (right, left, True)):
        report = mp.compare([a], [b], decode=decode)
        assert list(report.causes) == ["timestamp_rounding"]
        evidence = report.first.evidence
        assert f"temporal patch {place} of media[0]" in evidence
        assert back or shown in evidence
        assert f"{count} of 2 patches differ" in evidence


WORDS = {i: chr(33 + i) for i in range(94)}
WORDS |= {6486: " seconds", START: "<|vision_start|>", END: "<|vision_end|>"}


def test_a_tokenizer_reads_what_no_digits_are():
    """Of ids that are not one sign each only the text gives the seconds."""
    words = {900: "<0.2", 901: "<0.3", 902: "<1.2"}
    left, right = (video([[k, 6486, 29], [902, 6486, 29]], **HALVES) for k in (900, 901))
    report = mp.compare(
        [left], [right], decode=lambda ids: "".join((WORDS | words)[i] for i in ids)
    )
    assert list(report.causes) == ["timestamp_rounding"]
    assert list(mp.compare([left], [right]).causes) == ["unknown"]


def without(*names):
    def change(sample):
        for name in names:
            setattr(sample.media[0], name, None)

    return change


@pytest.mark.parametrize(
    "lose", [without("frame_indices"), without("fps"), without("frame_timestamps")]
)
def test_indices_and_fps_or_the_times_are_enough(lose):
    left, right = video(written(0.2, 1.2), **HALVES), video(written(0.2, 1.3), **HALVES)
    lose(right)
    assert list(mp.compare([left], [right]).causes) == ["timestamp_rounding"]


@pytest.mark.parametrize(
    ("seconds", "lose"),
    [
        ((0.2, 2.0), without()),  # no frame of the patch is there
        ((0.2, 1.3), without("fps", "frame_timestamps")),
        ((0.2, 1.3), without("frame_indices", "frame_timestamps")),
    ],
)
def test_timestamps_alone_have_possible_causes(seconds, lose):
    left, right = video(written(0.2, 1.2), **HALVES), video(written(*seconds), **HALVES)
    lose(right)
    report = mp.compare([left], [right])
    assert list(report.causes) == ["unknown"]
    assert "possible: timestamp_rounding, fps_missing, frame_sampling" in report.first.evidence


def test_other_pixels_do_not_hide_other_seconds():
    left, right = video(written(0.2, 1.2), **HALVES), video(written(0.3, 1.3), **HALVES)
    right.media[0].content_hash, right.media[0].cache_key = "0" * 64, "another"
    causes = mp.compare([left], [right]).causes
    assert set(causes) == {"timestamp_rounding", "frame_pixels"}


def fenced(sample, *, opened=True, closed=True):
    """Vision start and end around all of the video; `sample`'s spans moved along."""
    first, last = sample.modality_spans[0].start - 7, sample.modality_spans[-1].stop + 1
    ids = sample.input_ids.tolist()
    sample.input_ids = np.array(
        ids[:first] + [START] * opened + ids[first:last] + [END] * closed + ids[last:]
    )
    for span in sample.modality_spans:
        span.start, span.stop = span.start + opened, span.stop + opened
    for span in sample.loss_spans:
        span.start, span.stop = span.start + opened + closed, span.stop + opened + closed
    sample.position_ids = None
    return sample


def test_markers_around_a_video_need_no_setting():
    left, right = fenced(video(written(0.2, 1.2), **HALVES)), video(written(0.2, 1.2), **HALVES)
    right.position_ids = None
    for a, b in ((left, right), (right, left)):
        report = mp.compare([a], [b])
        assert list(report.causes) == ["video_markers"]
        name = "rollout" if a is left else "train"
        assert report.first.field == "input_ids"
        assert (
            f"only {name} has vision start and end around all of media[0]" in report.first.evidence
        )
    assert mp.compare([left], [left]).ok


def test_markers_and_the_template_and_the_seconds():
    left = fenced(video(written(0.2, 1.2), **HALVES))
    right = video(written(0.3, 1.2), system=range(40, 80), **HALVES)
    left.position_ids = right.position_ids = None
    right.processor["chat_template"] = "sha256:" + "2" * 64
    found = {"chat_template", "timestamp_rounding", "video_markers"}
    assert set(mp.compare([left], [right]).causes) == found
    assert set(mp.compare([right], [left]).causes) == found


@pytest.mark.parametrize("kept", [{"closed": False}, {"opened": False}])
def test_half_a_pair_of_markers_is_other_text(kept):
    left, right = (
        fenced(video(written(0.2, 1.2), **HALVES), **kept),
        video(written(0.2, 1.2), **HALVES),
    )
    right.position_ids = None
    report = mp.compare([left], [right])
    assert list(report.causes) == ["unknown"]
    assert "text outside the loss spans differs" in report.first.evidence


def test_a_video_that_was_cut_off_lacks_no_markers():
    left, right = (
        fenced(video(written(0.2, 1.2), **HALVES)),
        fenced(video(written(0.2, 1.2), **HALVES)),
    )
    stop = right.modality_spans[-1].start + 1
    right.input_ids, right.loss_spans = right.input_ids[:stop], []
    right.modality_spans[-1].stop = stop
    assert list(mp.compare([left], [right]).causes) == ["truncated", "truncated_medium"]


def test_a_setting_alone_tells_of_markers():
    """Of ids that are equal, for the engine expanded for the trainer."""
    left, right = video(written(0.2, 1.2), **HALVES), video(written(0.2, 1.2), **HALVES)
    left.processor["video_markers"], right.processor["video_markers"] = "kept", "replaced"
    (finding,) = mp.compare([left], [right]).findings
    assert (finding.cause, finding.field) == ("video_markers", "processor")


def test_a_template_beside_a_missing_fps():
    left, right = video(STAMPS), video(([27, 15, 29], [27, 17, 29]), fps=None, system=range(40, 80))
    right.processor["chat_template"] = "sha256:" + "2" * 64
    report = mp.compare([left], [right])
    assert set(report.causes) == {"fps_missing", "chat_template"}


def test_timestamps_of_another_video_are_no_template():
    left, right = video(STAMPS), video(([27, 18, 29], [27, 17, 29]), fps=None)
    left.media[0].total_frames, right.media[0].total_frames = 100, 90
    report = mp.compare([left], [right])
    assert "another video" in report.first.evidence and "fps_missing" not in report.causes
    assert "text outside" not in str(report.lines())


def test_text_between_two_occurrences_of_one_video_is_text():
    def twice(word):
        one, two = video(STAMPS), video(STAMPS)
        shift = len(one) + 1
        for span in [*two.modality_spans, *two.loss_spans]:
            span.start, span.stop = span.start + shift, span.stop + shift
        one.input_ids = np.concatenate([one.input_ids, [word], two.input_ids])
        one.modality_spans += two.modality_spans
        one.loss_spans += two.loss_spans
        one.position_ids = None
        return one

    left, right = twice(50), twice(51)
    (finding,) = mp.compare([left], [right]).findings
    assert (finding.field, finding.index) == ("input_ids", len(video(STAMPS)))
    assert "text outside the loss spans differs" in finding.evidence


def test_equal_videos_are_equal():
    assert mp.compare([video(STAMPS)], [video(STAMPS)]).ok
