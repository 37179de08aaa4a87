"""Trajectories for tests: contexts that grow, branch or are rewritten, and what each token was sampled after."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.samples import make_medium

from mmpack.families import get_family
from mmpack.layout.occurrences import occurrences
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.trajectory import Trajectory, Turn

Context = tuple[list[int], list[Medium]]
GRIDS = {"a": (1, 2, 4), "b": (1, 4, 4), "c": (1, 4, 6), "d": (1, 4, 8)}


def shot(name: str, family: str = "qwen2_5_vl") -> Medium:
    """A screenshot; equal names are one picture."""
    return make_medium(name, GRIDS[name[0]])


def screen(words: list[int], medium: Medium, family: str = "qwen2_5_vl") -> Context:
    """Words, then a picture between its markers, then a word."""
    about = get_family(family)
    run = [about.image_token_id] * medium.num_tokens
    return [*words, about.vision_start_id, *run, about.vision_end_id, 77], [medium]


def joined(*contexts: Context) -> Context:
    return [i for ids, _ in contexts for i in ids], [m for _, media in contexts for m in media]


def episode(
    turns: list[Turn], name: str = "e", family: str = "qwen2_5_vl", **fields: Any
) -> Trajectory:
    return Trajectory(name, "task", family, turns, **fields)


def grown(count: int = 3, family: str = "qwen2_5_vl", seed: int = 0) -> list[Turn]:
    """A context that only grows, one screenshot per turn; the third is the first again."""
    rng = np.random.default_rng(seed)
    context = screen([1, 2, 3], shot("a0"), family)
    turns = []
    for k in range(count):
        response = rng.integers(100, 1000, 3 + k).tolist()
        logprobs = -rng.exponential(size=len(response))
        ids, media = context
        turns.append(Turn(ids, response, media, logprobs, source="screenshot"))
        name = "a0" if k == 1 else f"{'abcd'[(k + 1) % 4]}{k + 1}"
        context = joined((ids + response, media), screen([50 + k], shot(name), family))
    return turns


@st.composite
def trajectories(draw: st.DrawFn, silent: bool = False) -> Trajectory:
    """Up to six turns: each grows from, branches off or retries an earlier one, or sees something new.

    `silent`: some of them are without loss.
    """
    words = st.lists(st.integers(0, 3), min_size=1, max_size=3)
    shots = st.sampled_from(["a0", "b0", "b1"]).map(shot)
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 6))):
        new = screen(draw(words), draw(shots)) if draw(st.booleans()) else (draw(words), [])
        how = draw(st.sampled_from(["grow", "branch", "retry", "new"])) if turns else "new"
        if how == "new":
            context = new
        else:
            at = turns[-1] if how == "grow" else draw(st.sampled_from(turns))
            seen = at.context_ids.tolist()
            context = (seen, at.media)
            if how != "retry":
                context = joined((seen + at.response_ids.tolist(), at.media), new)
        response = draw(st.lists(st.integers(0, 3), max_size=3))
        logprobs = [-draw(st.floats(0, 9, width=32)) for _ in response]
        loss = [] if silent and draw(st.integers(0, 3)) == 0 else None
        turns.append(Turn(context[0], response, context[1], logprobs=logprobs, loss_spans=loss))
    return episode(turns)


def scored_of_turns(turns: list[Turn]) -> Counter[Any]:
    """Each response token of turns with loss: (all ids before it, media keys before it, id, logprob), as sampled."""
    out: Counter[Any] = Counter()
    for turn in turns:
        ids, media = turn.input_ids.tolist(), tuple(m.cache_key for m in turn.media)
        for i, token in enumerate(turn.response_ids.tolist() if turn.loss_spans != [] else []):
            before = tuple(ids[: len(turn.context_ids) + i])
            value = None if turn.logprobs is None else float(turn.logprobs[i])
            out[(before, media, token, value)] += 1
    return out


def scored_of_samples(samples: list[Sample]) -> Counter[Any]:
    """Each loss token, likewise."""
    out: Counter[Any] = Counter()
    for s in samples:
        logprobs = s.rollout_logprobs
        for n, at in enumerate(s.loss_indices.tolist()):
            keys = tuple(s.media[o.media_index].cache_key for o in occurrences(s) if o.stop <= at)
            value = None if logprobs is None else float(logprobs[n])
            out[(tuple(s.input_ids[:at].tolist()), keys, int(s.input_ids[at]), value)] += 1
    return out
