"""What is equal, or was not recorded, or does not count, is never a finding."""

import copy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import traces

import mmpack as mp

UNRECORDED = ("position_ids", "attention_mask", "rollout_logprobs", "sampling", "finish_reason")
OF_MEDIA = (
    "content_hash",
    "size",
    "decoded_size",
    "mode",
    "fps",
    "frame_indices",
    "frame_timestamps",
)
OF_MEDIA += ("second_per_grid_ts", "total_frames")


@settings(max_examples=60)
@given(traces(), st.sets(st.sampled_from(UNRECORDED)), st.sets(st.sampled_from(OF_MEDIA)))
def test_what_one_side_did_not_record_is_no_difference(trace, names, of_media):
    train = copy.deepcopy(trace)
    for sample in train:
        for name in names:
            setattr(sample, name, None)
        for medium in sample.media:
            for name in of_media:
                setattr(medium, name, None)
    for left, right in ((trace, train), (train, trace)):
        report = mp.compare(left, right, require=())
        assert report.total_findings == 0, report.lines()
        assert report.ok == bool(trace)
        assert len(report.to_html()) > 100


@settings(max_examples=40)
@given(traces(), st.randoms(use_true_random=False))
def test_order_names_and_notes_do_not_count(trace, random):
    train = copy.deepcopy(trace)
    random.shuffle(train)
    for sample in train:
        sample.metadata = {"note": random.random()}
        for medium in sample.media:
            medium.source, medium.metadata = "elsewhere.png", {"note": 1}
    assert mp.compare(trace, train).total_findings == 0


@settings(max_examples=40)
@given(traces(), st.data())
def test_one_other_id_is_one_sample_with_findings(trace, data):
    texts = [s for s in trace if len(np.flatnonzero(s.input_ids < 151643))]
    if not texts:
        return
    chosen = data.draw(st.sampled_from(range(len(texts))))
    train = copy.deepcopy(trace)
    (changed,) = [s for s in train if s.sample_id == texts[chosen].sample_id]
    at = data.draw(st.sampled_from(np.flatnonzero(changed.input_ids < 151643).tolist()))
    changed.input_ids[at] = (changed.input_ids[at] + 1) % 1000
    report = mp.compare(trace, train)
    assert {f.sample_id for f in report.findings} == {changed.sample_id}


@pytest.mark.adapter
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_templates_of_another_text_that_render_the_same(family):
    """TRL's released template against its training template, and a comment at the end of one."""
    from mmpack.demo.qwen_processor import qwen_vl_processor

    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    released, training = (
        (folder / f"{family}{end}.jinja").read_text() for end in ("", "_training")
    )
    hf = qwen_vl_processor(family)
    picture = np.zeros((64, 64, 3), np.uint8)
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "Find x."}]

    def side(template):
        processor = mp.wrap_processor(hf, chat_template=template)
        ids = [785, 151645]
        return processor([{"role": "user", "content": parts}], response_ids=ids, sample_id="s0")

    for other in (training, released + "{# of ours #}"):
        left, right = side(released), side(other)
        assert left.processor["chat_template"] != right.processor["chat_template"]
        report = mp.compare([left], [right], require=("input_ids", "processor"))
        assert report.ok and not report.findings
        assert "what it rendered is compared" in report.not_compared["processor.chat_template"]
