"""Discounted returns of a million loss tokens in turns: one launch, plain torch, and a loop over padded columns."""

import os
from functools import partial

import gpu
import torch
from policy_loss import empty_launch, of_graph

import mmpack as mp

GAMMA = 0.99
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
    gpu.write(args.out, "returns", floors, rows)


if __name__ == "__main__":
    main()
