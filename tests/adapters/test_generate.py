"""Rollouts of `generate`: where a response ends, and that nothing but the temperature shapes its scores."""

import numpy as np
import pytest
import torch

from mmpack.adapters.internvl_processor import internvl_processor
from mmpack.adapters.qwen_processor import qwen_vl_processor
from mmpack.adapters.transformers import rollout, tiny_qwen2_5_vl
from mmpack.errors import ArgumentError

pytestmark = pytest.mark.adapter
PROMPT = [[{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]]


@pytest.fixture(scope="module")
def parts():
    return tiny_qwen2_5_vl(), qwen_vl_processor()


def test_every_stop_id_ends_a_response(parts):
    model, processor = parts
    model.generation_config.eos_token_id = [151645, *range(0, 151643, 2)]  # half of all words
    torch.manual_seed(0)
    samples = rollout(model, processor, PROMPT, ["g"], n=16, max_new_tokens=6)
    lengths = {s.num_loss_tokens for s in samples}
    assert len(lengths) > 1  # they do end at different places
    for s in samples:
        response = s.input_ids[s.loss_indices]
        stops = np.isin(response, model.generation_config.eos_token_id)
        assert not stops[:-1].any()
        assert s.finish_reason == ("stop" if stops[-1] else "length")
        assert len(s.rollout_logprobs) == len(response)


def test_a_checkpoint_s_penalties_do_not_reach_the_scores(parts):
    model, processor = parts
    model.generation_config.eos_token_id = 151645
    torch.manual_seed(0)
    plain = rollout(model, processor, PROMPT, ["g"], n=2, max_new_tokens=5)
    model.generation_config.repetition_penalty = 5.0
    torch.manual_seed(0)
    again = rollout(model, processor, PROMPT, ["g"], n=2, max_new_tokens=5)
    assert model.generation_config.repetition_penalty == 5.0  # given back
    for a, b in zip(plain, again, strict=True):
        assert np.array_equal(a.input_ids, b.input_ids)
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)


def test_a_family_without_grids_is_refused(parts):
    with pytest.raises(ArgumentError, match="internvl's processor returns no grids"):
        rollout(parts[0], internvl_processor(max_tiles=4), PROMPT, ["g"])
