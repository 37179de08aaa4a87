"""Trees that readers make, packed with shared prefixes: each logprob is that of its turn alone."""

import pytest
import torch
from support.models import small_model, with_pixels
from support.record_readers import READERS
from support.recorded_trees import turn_of
from support.trajectories import joined, screen, shot

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.contracts import TOLERANCES
from mmpack.trajectory import to_samples

pytestmark = pytest.mark.adapter
LAYOUTS = TOLERANCES["layouts"].value


def tree(pictures=True):
    """A context that grows, is sampled again, forks behind the first answer, and is rewritten."""

    def seen(words, name):
        return screen(words, shot(name)) if pictures else ([*words, 11, 12], [])

    first = seen([1, 2, 3], "a0")
    turns = [turn_of(first, [101, 102, 103], 0), turn_of(first, [104, 105], 1)]
    grown = joined((first[0] + [101, 102, 103], first[1]), seen([50], "b0"))
    turns.append(turn_of(grown, [106, 107], 2))
    forked = joined((first[0] + [101, 102, 103], first[1]), seen([51], "b1"))
    turns.append(turn_of(forked, [108], 3))
    anew = joined((first[0] + [101, 999, 103], first[1]), ([52], []))
    turns.append(turn_of(anew, [109, 110], 4))
    return turns


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("vllm", "verl", "skyrl")]


@pytest.mark.parametrize("source", ["prime_rl", *SLOW])
def test_shared_logprobs_are_those_of_each_turn_alone(source):
    model = small_model("qwen2_5_vl")
    turns = tree(pictures=READERS[source].pictures)
    media = {m.cache_key: m for t in turns for m in t.media}
    (episode,) = READERS[source].read(READERS[source].write(turns), media)
    for turn in episode.turns:  # routes are of a mixture of experts, which this model is not
        turn.routed_experts = turn.kept_ids = turn.teachers = None
    assert sorted(t.metadata.get("parts", {}).get("kind", "") for t in episode.turns) == [
        *[""] * 3,
        "fork",
        "rewritten",
    ]
    alone, found = {}, {}
    with attach(model), torch.no_grad():
        for turn in to_samples(episode, merge=False):
            (sample,) = with_pixels([turn])
            logprobs = packed_logprobs(model, mp.pack([sample]))
            alone[sample.loss_spans[0].turn] = logprobs
        samples = with_pixels(to_samples(episode))
        batch = mp.pack(samples, share_prefix=True)
        shared = packed_logprobs(model, batch)
    assert len(samples) == 4 and batch.num_tokens < sum(map(len, samples))
    for sample, own in zip(samples, batch.unpack_loss(shared), strict=True):
        for span in sample.loss_spans:
            count = span.stop - span.start
            found[span.turn], own = own[:count], own[count:]
    assert sorted(found) == sorted(alone) == list(range(5))
    for k, logprobs in alone.items():
        assert torch.allclose(found[k], logprobs, atol=LAYOUTS, rtol=0)
