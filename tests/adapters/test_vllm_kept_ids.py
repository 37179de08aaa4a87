"""Kept ids of a real vLLM engine: the trainer's logprobs over them are the rollout's, and over all ids they are not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.engines import checkpoint, image, messages, reset, shared_engine, trainer, video
from test_docs_run import blocks, run
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.vllm import VllmEngine, to_samples
from mmpack.adapters.vllm.samples import PROCESSED
from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, BackendError

pytestmark = pytest.mark.engine

MAX, MEAN = (TOLERANCES[f"engines_{name}"].value for name in ("max", "mean"))
PROMPTS = [messages(image(1)), messages(video(3)), messages(text="What is the sum of the angles?")]
NAMES = ["one", "film", "text"]
FILTERS = {
    "top_k": ({"top_k": 20, "temperature": 0.7}, [TopKLogitsWarper(20)]),
    "top_p after top_k": (
        {"top_p": 0.6, "top_k": 50},
        [TopKLogitsWarper(50), TopPLogitsWarper(0.6)],
    ),
    "min_p": ({"min_p": 0.97, "top_k": 64}, [MinPLogitsWarper(0.97), TopKLogitsWarper(64)]),
}


@pytest.fixture
def engine():
    engine = shared_engine(kept_ids=True)
    reset(engine)
    return engine


def trainer_hidden(samples):
    model, _ = trainer()
    batch = mp.pack(samples, share_prefix=True)
    with attach(model), torch.no_grad():
        return batch, model.model(**model_inputs(batch, model))[0][0], model.lm_head.weight.detach()


def trainer_logprobs(samples, temperature, supported):
    """What transformers computes for the samples, in one pack, over the kept ids or over all."""
    batch, hidden, head = trainer_hidden(samples)
    support = batch.kept_ids if supported else None
    return mp.linear_selected_logprobs(
        hidden,
        head,
        batch.loss_targets,
        rows=batch.loss_rows,
        temperature=temperature,
        support=support,
    ).numpy()


@pytest.mark.parametrize("name", FILTERS)
def test_the_ratio_is_one_over_the_kept_ids_and_drifts_over_all(engine, name):
    settings = {"temperature": 1.0} | FILTERS[name][0]
    samples = engine.rollout(PROMPTS, NAMES, n=2, max_new_tokens=6, **settings)
    assert mp.validate(samples) == []
    rollout = np.concatenate([s.rollout_logprobs for s in samples])
    kept = trainer_logprobs(samples, settings["temperature"], True)
    assert np.abs(kept - rollout).max() <= MAX and np.abs(kept - rollout).mean() <= MEAN
    assert np.exp(kept - rollout).mean() == pytest.approx(1.0, abs=1e-4)
    whole = trainer_logprobs(samples, settings["temperature"], False)
    assert np.exp(whole - rollout).mean() < 0.9
    for s in samples:
        assert len(s.kept_ids) == s.num_loss_tokens and s.sampling["logprobs"] == "processed"
    # the lists are what transformers' own filters leave
    batch, hidden, head = trainer_hidden(samples)
    scores = hidden[batch.loss_rows.long()] @ head.T / settings["temperature"]
    for warp in FILTERS[name][1]:
        scores = warp(None, scores)
    wanted = [np.flatnonzero(row).tolist() for row in np.isfinite(scores.numpy())]
    assert [ids.tolist() for s in samples for ids in s.kept_ids.lists()] == wanted


def test_without_top_k_every_id_is_asked_for(engine):
    [sample] = engine.rollout(PROMPTS[2:], ["text"], n=1, max_new_tokens=2, top_p=0.01)
    assert 1 < sample.kept_ids.lengths.max() < engine.processor.vocab_size / 10
    kept = trainer_logprobs([sample], 1.0, True)
    np.testing.assert_allclose(kept, sample.rollout_logprobs, atol=MAX, rtol=0)


def test_what_keeps_no_ids_is_refused(engine, monkeypatch):
    for settings in ({"temperature": 0.0, "top_k": 5}, {"temperature": 0.5}):
        with pytest.raises(
            ArgumentError, match=r"leave no list of kept ids.* Fix: use temperature"
        ):
            engine.rollout(PROMPTS[:1], NAMES[:1], **settings)
    monkeypatch.setitem(engine.about, "kept_ids", "sampling_mask")  # Model Runner V2's own
    with pytest.raises(ArgumentError, match="temperature above 0 and top_k,"):
        engine.rollout(PROMPTS[:1], NAMES[:1], top_p=0.5)
    # vLLM's own answer to `return_sampling_mask=True` here, where it has no Triton
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    with pytest.raises(BackendError, match=r"replay requires Model Runner V2|since 0\.28"):
        VllmEngine(checkpoint(), kept_ids=True)


# -- RequestOutputs as the package defines them -----------------------------------------------------------------------


def converted(engine, mask=None, steps=None, flat=False, logprobs_mode=PROCESSED, **sampling):
    """A completion of ids 5 and 9, as vLLM's own classes hold it, as a sample."""
    from vllm import CompletionOutput, RequestOutput, SamplingParams, outputs
    from vllm.inputs import tokens_input
    from vllm.logprobs import FlatLogprobs, Logprob

    steps = steps or [{5: -1.5, 7: -0.25}, {9: -0.5, 5: -0.9}]
    logprobs = [
        {token: Logprob(value, rank=k + 1) for k, (token, value) in enumerate(step.items())}
        for step in steps
    ]
    if flat:
        logprobs, plain = FlatLogprobs(), logprobs
        logprobs.extend(plain)
    of = {"index": 0, "text": "", "token_ids": [5, 9], "cumulative_logprob": None}
    made = CompletionOutput(**of, logprobs=logprobs)
    if mask is not None:
        made.sampling_mask = getattr(outputs, "SamplingMask", SimpleNamespace)(token_ids=mask)
    output = RequestOutput("r", None, [11, 12, 13], None, [made], True)
    params = SamplingParams(**{"top_k": 2, "logprobs": 1} | sampling)
    given = ([output], [tokens_input([11, 12, 13])], [{}], params, engine.processor)
    [sample] = to_samples(*given, logprobs_mode=logprobs_mode)
    return sample


def test_lists_of_model_runner_v2_are_stored_and_flat_logprobs_read_as_dicts_are(engine):
    sample = converted(engine, mask=[[7, 5], [9]])
    assert [ids.tolist() for ids in sample.kept_ids.lists()] == [[5, 7], [9]]
    assert mp.validate(sample) == []
    a, b = (converted(engine, flat=flat) for flat in (False, True))
    assert a.rollout_logprobs.tolist() == b.rollout_logprobs.tolist() == [-1.5, -0.5]
    assert a.metadata["argmax_ids"] == b.metadata["argmax_ids"] == [5, 9]
    assert a.kept_ids is b.kept_ids is None  # one logprob a token: what else is kept is not known


def test_a_list_is_whole_when_an_id_that_is_not_kept_came_too(engine):
    steps = [{5: -1.5, 7: -0.25, 8: -np.inf}, {9: 0.0, 5: -np.inf}]
    sample = converted(engine, steps=steps, logprobs=3)
    assert [ids.tolist() for ids in sample.kept_ids.lists()] == [[5, 7], [9]]
    with pytest.raises(ArgumentError, match=r"token 1: all of the 3 likeliest.*logprobs=-1"):
        converted(engine, steps=[steps[0], {9: -0.5, 5: -0.9}], logprobs=3)
    for off in ({"top_k": 0}, {"top_k": 2, "temperature": 0}):  # nothing is filtered
        assert converted(engine, logprobs=-1, **off).kept_ids is None
    sample = converted(engine, steps=[steps[0], {9: -0.5, 5: -0.9}], logprobs=-1)
    assert [ids.tolist() for ids in sample.kept_ids.lists()] == [[5, 7], [5, 9]]


@pytest.mark.parametrize(
    "given, settings, why",
    [
        ([[5], [9]], {"logprobs_mode": "raw_logprobs"}, "logprobs of kind 'raw'"),
        ([[5]], {}, "1 lists of kept ids for 2 sampled tokens.*whole outputs"),
        ([[5], [9]], {"repetition_penalty": 1.2}, "are not a softmax"),
        ([[5], [9]], {"logit_bias": {7: 1.0}}, "logit_bias=.*Fix: sample without logit_bias"),
        ([[5, 5], [9]], {}, "holds id 5 twice"),
    ],
)
def test_lists_that_cannot_be_right_are_refused(engine, given, settings, why):
    with pytest.raises(ArgumentError, match=why):
        converted(engine, mask=given, **settings)


def test_the_page_s_example(engine, capsys):
    """docs/engines.md, with the running engine."""
    page = "docs/engines.md"
    [code] = [block for block in blocks(page) if "kept_ids=True" in block[1]]
    names = {"mp": mp, "VllmEngine": lambda folder, **settings: shared_engine(**settings)}
    ran = run(page, names | {"prompts": PROMPTS[:1], "group_ids": NAMES[:1]}, [code])
    assert capsys.readouterr().out.startswith("Ragged(lists=")
    assert ran["batch"].kept_ids is not None and len(ran["samples"]) == 4
