"""Chunks of actions as spans: the levels of RLinf-VLA against its formulas in float64, on rectangles [chunks, 8, 7]."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.chunks import action_chunks

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CHUNK, DIMS = 8, 7


@pytest.fixture(scope="module")
def episodes():
    return list(mp.read_trace(FIXTURES / "vla/chunks.jsonl"))


def rectangle_loss(level, logprobs, old, advantages, low, high):
    """RLinf's PPO loss of a level, on [chunks, 8, 7] in float64: sums within the level, ratio, clip, plain mean.

    `advantages`: [chunks] or [chunks, 8].
    """
    if level == "action":
        logprobs, old = logprobs.sum(-1), old.sum(-1)
    elif level == "chunk":
        logprobs, old = logprobs.sum((1, 2)), old.sum((1, 2))
    while advantages.ndim < logprobs.ndim:
        advantages = advantages.unsqueeze(-1)
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-advantages * ratio, -advantages * clipped).mean()


@pytest.mark.parametrize("layout", ["pack", "share", "pad"])
@pytest.mark.parametrize(
    ("level", "tokens", "per"),
    [("token", None, "action"), ("action", DIMS, "chunk"), ("chunk", None, "chunk")],
)
def test_each_level_is_rlinf_s(episodes, layout, level, tokens, per):
    batch = (
        mp.pad(episodes) if layout == "pad" else mp.pack(episodes, share_prefix=layout == "share")
    )
    chunks, actions = action_chunks(batch), action_chunks(batch, tokens=DIMS)
    assert len(chunks.turn) == 12 and len(actions.turn) == 96
    old = batch.loss_columns["rollout_logprobs"]
    generator = torch.Generator().manual_seed(0)
    moved = old + 0.1 * torch.randn(len(old), generator=generator)
    logprobs = moved.clone().requires_grad_()
    given = torch.randn(len(chunks.turn if per == "chunk" else actions.turn), generator=generator)
    by_token = (chunks if per == "chunk" else actions).spread(given)
    if level == "token":
        out = mp.policy_loss(logprobs, by_token, batch.cu_loss, old, clip_low=0.2, clip_high=0.28)
    else:
        of = chunks if level == "chunk" else actions
        advantages = by_token[of.cu_tokens[:-1].long()]
        out = mp.policy_loss(
            of.sum(logprobs), advantages, of.cu_loss, of.sum(old), clip_low=0.2, clip_high=0.28
        )
    out.loss.backward()

    exact = moved.double().requires_grad_()
    shape = (-1, CHUNK, DIMS)
    wide = given.double() if per == "chunk" else given.double().view(-1, CHUNK)
    wanted = rectangle_loss(level, exact.view(shape), old.double().view(shape), wide, 0.2, 0.28)
    wanted.backward()
    torch.testing.assert_close(out.loss.double(), wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logprobs.grad.double(), exact.grad, atol=1e-8, rtol=1e-5)
    assert 0 < float(out.metrics["clip_fraction"]) < 1


def test_rewards_and_costs_of_turns_are_those_of_chunks(episodes):
    batch = mp.pack(episodes)
    chunks = action_chunks(batch)
    paid = chunks.sum(mp.scatter_rewards(batch, weights={"progress": 1.0, "success": 0.0}))
    wanted = [s.value for e in episodes for s in e.rewards if s.name == "progress"]
    np.testing.assert_allclose(paid.numpy(), wanted, rtol=1e-6)
    advantages, _ = mp.gae(paid.float(), torch.zeros(12), chunks.cu_loss, gamma=0.5, lam=1.0)
    a, b, c = wanted[:3]
    np.testing.assert_allclose(advantages[:3].numpy(), [a + b / 2 + c / 4, b + c / 2, c], rtol=1e-6)
    charged = mp.losses.scatter_costs(batch).map(lambda cost: chunks.sum(cost).float())
    assert charged.sums()[0]["collision"] == sum(c.value for e in episodes for c in e.costs)


def test_action_spans_are_the_chunks(episodes):
    """The same spans: what an action decodes to, and what the loss counts as one chunk."""
    sys.path.insert(0, str(FIXTURES))
    try:
        import vla
    finally:
        sys.path.remove(str(FIXTURES))
    for episode in episodes:
        for span, action in zip(episode.loss_spans, episode.action_spans, strict=True):
            assert (span.start, span.stop, span.turn) == (action.start, action.stop, action.turn)
            bins = episode.input_ids[span.start : span.stop] - (vla.TEXT - vla.BINS)
            centres = (bins.reshape(CHUNK, DIMS) + 0.5) / vla.BINS * 2 - 1
            np.testing.assert_allclose(centres, action.action["chunk"], atol=1 / vla.BINS + 1e-9)


def test_samples_without_loss_tokens_have_no_chunk():
    some = [
        ("text", [1, 2]),
        ("response", [3, 4], 0),
        ("observation", [5], 0),
        ("response", [6], 1),
    ]
    batch = mp.pack([make_sample([("text", [1])], "a"), make_sample(some, "b")])
    chunks = action_chunks(batch)
    assert chunks.cu_tokens.tolist() == [0, 2, 3] and chunks.cu_loss.tolist() == [0, 0, 2]
    none = action_chunks(mp.pack([make_sample([("text", [1])])]))
    assert none.cu_tokens.tolist() == [0] and none.cu_loss.tolist() == [0, 0]


def test_chunks_move_with_their_batch(episodes):
    """On a device without values a read would raise: neither method waits for one."""
    chunks = action_chunks(mp.pack(episodes))
    there = chunks.to("meta")
    assert {x.device.type for x in (there.cu_tokens, there.cu_loss, there.turn)} == {"meta"}
    assert there.spread(torch.zeros(12, device="meta")).shape == (12 * 56,)
    assert torch.equal(chunks.to("cpu").cu_tokens, chunks.cu_tokens)


def test_wrong_arguments_are_one_line(episodes):
    batch = mp.pack(episodes)
    with pytest.raises(ArgumentError, match="has 56 loss tokens, not a multiple of 9"):
        action_chunks(batch, tokens=9)
    with pytest.raises(ArgumentError, match="tokens is 0"):
        action_chunks(batch, tokens=0)
    with pytest.raises(ArgumentError, match="batch is of type list"):
        action_chunks(episodes)
    bare = mp.pack([make_sample([("text", [1]), ("response", [2])])])
    with pytest.raises(ArgumentError, match="'s0' belongs to no turn"):
        action_chunks(bare)
    parts = [("text", [1]), ("response", [2], 0), ("response", [3], 1), ("response", [4], 0)]
    with pytest.raises(ArgumentError, match="in several parts"):
        action_chunks(mp.pack([make_sample(parts)]))
    with pytest.raises(ArgumentError, match=r"expected \[12\]"):
        action_chunks(batch).spread(torch.ones(3))
    with pytest.raises(ArgumentError, match="cu_loss"):
        action_chunks(batch).sum(torch.ones(3))
