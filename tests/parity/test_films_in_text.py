"""Videos that lie in the text frame by frame, timestamps between them (Qwen3-VL): whose timestamps differ, and why."""

import numpy as np
import pytest
from support.samples import make_medium

import mmpack as mp
from mmpack.schema.spans import LossSpan, ModalitySpan

START, END, VIDEO = 151652, 151653, 151656


def film(stamps, fps=25.0, indices=(0, 1, 25, 26), times=None, system=(11, 12, 13)):
    """A prompt with a film, one span a temporal patch, each after its timestamp's ids; then a response."""
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
    left, right = film(STAMPS), film(stamps, fps=None)
    for a, b in ((left, right), (right, left)):
        report = mp.compare([a], [b])
        assert list(report.causes) == ["fps_missing"]
        assert any(f.field == "input_ids" for f in report.findings)


def test_other_frames_are_other_timestamps():
    left = film(STAMPS)
    right = film((*STAMPS, [27, 19, 29]), indices=(0, 1, 25, 26, 50, 51))
    assert list(mp.compare([left], [right]).causes) == ["frame_sampling"]
    assert list(mp.compare([right], [left]).causes) == ["frame_sampling"]


def test_timestamps_alone_have_possible_causes():
    left, right = film(STAMPS), film(([27, 15, 29], [27, 17, 29]))
    report = mp.compare([left], [right])
    assert list(report.causes) == ["unknown"]
    assert "possible: fps_missing, frame_sampling" in report.first.evidence


def test_a_template_beside_a_missing_fps():
    left, right = film(STAMPS), film(([27, 15, 29], [27, 17, 29]), fps=None, system=range(40, 80))
    right.processor["chat_template"] = "sha256:" + "2" * 64
    report = mp.compare([left], [right])
    assert set(report.causes) == {"fps_missing", "chat_template"}


def test_timestamps_of_another_film_are_no_template():
    left, right = film(STAMPS), film(([27, 18, 29], [27, 17, 29]), fps=None)
    left.media[0].total_frames, right.media[0].total_frames = 100, 90
    report = mp.compare([left], [right])
    assert "another video" in report.first.evidence and "fps_missing" not in report.causes
    assert "text outside" not in str(report.lines())


def test_words_between_two_showings_of_one_film_are_words():
    def twice(word):
        one, two = film(STAMPS), film(STAMPS)
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
    assert (finding.field, finding.index) == ("input_ids", len(film(STAMPS)))
    assert "text outside the loss spans differs" in finding.evidence


def test_equal_films_are_equal():
    assert mp.compare([film(STAMPS)], [film(STAMPS)]).ok
