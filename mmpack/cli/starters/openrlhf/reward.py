"""The reward that run.sh names. OpenRLHF calls it once per response."""

import torch


def reward_func(queries, prompts, labels, **more):  # yours
    """1 for the right letter, else 0. A query is the prompt, then the response, as text with special tokens."""
    answers = [query.rpartition("assistant\n")[2].strip()[:1] for query in queries]
    right = torch.tensor([float(a == label) for a, label in zip(answers, labels, strict=True)])
    return {"rewards": right, "scores": right}
