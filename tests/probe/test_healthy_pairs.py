"""The probe is silent on healthy pairs: layouts, paddings, dtypes, attentions, families and micro-batches mixed."""

import pytest
from healthy import draw_pair

import mmpack as mp

FEW, ALL = 10, 110


def assert_silent(seed):
    pair = draw_pair(seed)
    report = mp.probe.run(*pair.sides, pair.samples)
    assert report.ok, f"{pair.words}\n{report.text()}"
    names = {row.module for row in report.modules}
    assert {"lm_head", "logprobs", "model.language_model.norm"} <= names
    if any(s.media for s in pair.samples):
        assert any(row.space != "text" for row in report.modules), "no row of the tower"


@pytest.mark.few(2)
@pytest.mark.adapter
@pytest.mark.parametrize("seed", range(FEW))
def test_a_healthy_pair_is_silent(seed):
    assert_silent(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, ALL))
def test_more_healthy_pairs_are_silent(seed):
    assert_silent(seed)
