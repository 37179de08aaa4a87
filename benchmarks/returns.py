"""Returns and scores of a million loss tokens in turns: one launch, plain torch, and loops of frameworks."""

import os
from functools import partial
from types import SimpleNamespace

import gpu
import numpy as np
import torch
from policy_loss import empty_launch, of_graph

import mmpack as mp
from mmpack.packing.places import LossPlaces

GAMMA = 0.99
TURNS, SAMPLES = 10_000, 100
LENGTHS = {
    "10,000 turns of 100": [100] * 10_000,
    "10,000 turns of 1 to 199": [1 + 2 * (k % 100) for k in range(10_000)],
    "32 samples of 31,250": [31_250] * 32,
}


def by_columns(padded):
    """The loop of frameworks: a step for each token of the longest, over rectangles [B, longest]."""
    running, out = torch.zeros_like(padded[:, 0]), torch.empty_like(padded)
    for t in reversed(range(padded.shape[1])):
        running = padded[:, t] + GAMMA * running
        out[:, t] = running
    return out


def scored(device):
    """10,000 turns of 100 loss tokens in 100 samples: what `scatter_rewards` reads of a batch, with a score a turn."""
    per, tokens = TURNS // SAMPLES, 100
    offsets = np.arange(SAMPLES + 1) * per * tokens
    turn = np.tile(np.repeat(np.arange(per), tokens), SAMPLES)
    token = np.tile(np.arange(per * tokens) + np.repeat(np.arange(per), tokens), SAMPLES)
    regions = np.zeros((0, 3), dtype=np.int64)
    values = torch.randn(TURNS).tolist()
    return SimpleNamespace(
        sample_ids=[f"s{b}" for b in range(SAMPLES)],
        cu_loss=torch.from_numpy(offsets).to(device),
        loss_turn=torch.from_numpy(turn).to(device),
        loss_places=LossPlaces.of(offsets, turn, token, regions),
        rewards=[
            [mp.Score("step", values[b * per + k], {"turn": k}) for k in range(per)]
            for b in range(SAMPLES)
        ],
    )


def at_last(batch):
    """[N] float32 by a loop over the scores, as their places are known: turns of 100 tokens, one after the other."""
    want = torch.zeros(len(batch.loss_turn))
    want[99::100] = torch.tensor([s.value for scores in batch.rewards for s in scores])
    return want


def scatter_rows(backends):
    """A call reads scores on the host, so that no graph holds it: its time and that of the host are two columns."""
    batch, rows = scored("cuda"), []
    for backend in backends:
        os.environ["MMPACK_BACKEND"] = backend
        call = partial(mp.scatter_rewards, batch)
        gpu.require(torch.equal(call().cpu(), at_last(batch)), "scatter_rewards")
        row = {"backend": backend, "us": gpu.milliseconds(call) * 1e3}
        row |= {"host_us": gpu.host_microseconds(call), "what": "scatter_rewards"}
        rows.append(row | {"shape": "10,000 scores of turns of 100"})
        rows[-1]["bytes"] = 4 * len(batch.loss_turn)
    return rows


def main():
    args = gpu.arguments("returns", backends={"nargs": "+", "default": ["triton", "torch"]})
    floors = {
        "copy_bytes_per_second": gpu.copy_bytes_per_second(),
        "empty_launch_us": empty_launch(),
    }
    rows = []
    for shape, lengths in LENGTHS.items():
        cu = torch.tensor([0, *lengths]).cumsum(0)
        rewards = torch.randn(sum(lengths))
        parts = rewards.split(lengths)
        padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        looped = by_columns(padded.double())
        want = torch.cat([row[:n] for row, n in zip(looped, lengths, strict=True)]).float()
        on_gpu, offsets, rectangle = rewards.cuda(), cu.cuda(), padded.cuda()
        call = partial(mp.discounted_returns, on_gpu, offsets, GAMMA)
        for backend in args.backends:
            os.environ["MMPACK_BACKEND"] = backend
            gpu.require(float((call().cpu() - want).abs().max()) <= 1e-4, shape)
            rows.append(
                {"backend": backend, "us": of_graph(call), "host_us": gpu.host_microseconds(call)}
            )
            rows[-1] |= {"what": "discounted_returns", "shape": shape}
        taken = gpu.milliseconds(partial(by_columns, rectangle), repeats=3) * 1e3
        rows.append(
            {"what": "loop over columns", "backend": "framework", "shape": shape, "us": taken}
        )
        for row in rows:
            if row["shape"] == shape:
                row["bytes"] = 8 * len(rewards)
                row["copy_us"] = row["bytes"] / floors["copy_bytes_per_second"] * 1e6
                row["launches_of_empty"] = row["us"] / floors["empty_launch_us"]
    gpu.write(args.out, "returns", floors, rows + scatter_rows(args.backends))


if __name__ == "__main__":
    main()
