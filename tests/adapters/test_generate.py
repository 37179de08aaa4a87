"""Rollouts of `generate`: where a response ends, and that nothing but the temperature shapes its scores."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.replicas.internvl_processor import internvl_processor
from support.tiny_models import tiny_model, tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import rollout
from mmpack.demo.clips import clip_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError

pytestmark = pytest.mark.adapter
PROMPT = [[{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]]


@pytest.fixture(scope="module")
def parts():
    return tiny_qwen2_5_vl(), qwen_vl_processor()


def test_every_stop_id_ends_a_response_and_no_penalty_reaches_the_scores(parts):
    model, processor = parts
    own = model.generation_config
    own.eos_token_id = [151645, *range(0, 151643, 2)]  # half of all ids
    torch.manual_seed(0)
    samples = rollout(model, processor, PROMPT, ["g"], n=8, max_new_tokens=6)
    assert len({s.num_loss_tokens for s in samples}) > 1  # they do end at different places
    for s in samples:
        response = s.input_ids[s.loss_indices]
        stops = np.isin(response, own.eos_token_id)
        assert not stops[:-1].any()
        assert s.finish_reason == ("stop" if stops[-1] else "length")
        assert len(s.rollout_logprobs) == len(response)
    own.repetition_penalty = 5.0
    torch.manual_seed(0)
    again = rollout(model, processor, PROMPT, ["g"], n=8, max_new_tokens=6)
    assert model.generation_config is own and own.repetition_penalty == 5.0  # given back
    for a, b in zip(samples, again, strict=True):
        assert np.array_equal(a.input_ids, b.input_ids)
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)
    own.repetition_penalty, own.eos_token_id = None, 151645


@pytest.mark.parametrize(
    ("family", "policy"),
    [("qwen2_5_vl", "qwen_vl_utils"), pytest.param("qwen3_vl", None, marks=pytest.mark.slow)],
)
def test_videos_are_what_the_trainer_makes_of_them(family, policy, tmp_path):
    """The processor of transformers writes the ids, `get_rope_index` the positions; both get the plan's times."""
    (tmp_path / "a.mp4").write_bytes(clip_exercises(1)[0].video)
    hf = qwen_vl_processor(family, min_pixels=3136, max_pixels=60 * 28 * 28)
    options = {"media_root": tmp_path, "video_policy": policy, "video_settings": {"fps": 2.0}}
    film = {"type": "video", "video": "a.mp4"}
    picture = {"type": "image", "image": Image.new("RGB", (80, 60), (9, 99, 199))}
    ask = [{"role": "user", "content": [picture, film, film, {"type": "text", "text": "Which?"}]}]
    torch.manual_seed(0)
    rolled = rollout(tiny_model(family), hf, [ask], ["g"], n=2, max_new_tokens=3, **options)
    processor, names = mp.wrap_processor(hf, **options), ("sample_id", "sampling", "finish_reason")
    train = [
        processor(
            ask, s.input_ids[s.loss_indices], group_id="g", **{n: getattr(s, n) for n in names}
        )
        for s in rolled
    ]
    report = mp.compare(rolled, train)
    assert report.ok, report.findings
    for a, b in zip(rolled, train, strict=True):
        assert [m.modality for m in a.media] == ["image", "video"] and mp.validate(a) == []
        assert a.media[1].second_per_grid_ts == b.media[1].second_per_grid_ts
        assert (a.media[1].source, a.media[1].file_hash) == ("a.mp4", b.media[1].file_hash)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"max_new_tokens": float("nan")}, "max_new_tokens is nan, expected a whole number of 1"),
        ({"n": 0}, "n is 0, expected a whole number of 1 or more"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0}, "top_p is 0, expected a finite number above 0 up to 1"),
        ({"top_k": -1}, "top_k is -1, expected a whole number of 0 or more"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"group_ids": []}, "group_ids has 0 entries for 1 prompts"),
        ({"group_ids": "g"}, "group_ids is of type str"),
        ({"group_ids": [1]}, r"group_ids\[0\] is of type int, expected a str"),
        ({"model": None}, "the model is None, which has no generate"),
        ({"hf_processor": internvl_processor}, "internvl's processor returns no grids"),
    ],
)
def test_wrong_arguments_stop_before_anything_is_sampled(parts, wrong, match):
    wrong = {k: v(max_tiles=4) if v is internvl_processor else v for k, v in wrong.items()}
    given = {"model": parts[0], "hf_processor": parts[1], "prompts": PROMPT, "group_ids": ["g"]}
    with pytest.raises(ArgumentError, match=rf"^rollout: {match}.* Fix: [^\n]+$"):
        rollout(**(given | {"max_new_tokens": 2} | wrong))
