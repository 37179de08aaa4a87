"""Group advantages and reward scatter on each backend. Times as in policy_loss.py: graph replays, and the host's."""

import os

import gpu
import torch
from policy_loss import empty_launch, of_graph

import mmpack as mp
from mmpack.losses.rewards.scores import scatter_op

BATCHES = (32, 512, 4096)
LENGTHS = {
    "B = 32, N = 13,107": [410] * 31 + [397],
    "B = 512, N = 131,072": [256] * 512,
    "B = 4,096, N = 131,072": [32] * 4096,
}


def main():
    args = gpu.arguments("rewards", backends={"nargs": "+", "default": ["triton", "torch"]})
    floors = {
        "copy_bytes_per_second": gpu.copy_bytes_per_second(),
        "empty_launch_us": empty_launch(),
    }
    rows = []

    def measure(what, shape, moved, call, want):
        for backend in args.backends:
            os.environ["MMPACK_BACKEND"] = backend
            gpu.require(float((call().cpu() - want).abs().max()) <= 1e-6, what)
            row = {"what": what, "backend": backend, "shape": shape, "us": of_graph(call)}
            row["launches_of_empty"] = row["us"] / floors["empty_launch_us"]
            row["bytes"] = moved
            row["copy_us"] = moved / floors["copy_bytes_per_second"] * 1e6
            rows.append(row | {"host_us": gpu.host_microseconds(call)})

    for count in BATCHES:
        rewards, groups = torch.randn(count), torch.arange(count) // 8
        on_gpu = rewards.cuda(), groups.cuda()
        for kind in ("grpo", "reinforce_pp"):
            os.environ["MMPACK_BACKEND"] = "torch"
            want = mp.group_advantages(rewards.double(), groups, kind)
            measure(
                f"group_advantages {kind}",
                f"B = {count:,}",
                16 * count,
                lambda k=kind, x=on_gpu: mp.group_advantages(*x, k, check=False),
                want,
            )
    for shape, lengths in LENGTHS.items():
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        rewards, count = torch.randn(len(lengths)), sum(lengths)
        on_gpu = rewards.cuda(), cu.cuda(), count, 1.0
        for at in ("last", "mean"):
            values = rewards.repeat_interleave(torch.tensor(lengths)).double()
            lasting = torch.zeros(count, dtype=torch.float64)
            lasting[cu[1:].long() - 1] = rewards.double()
            spread = values / torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
            measure(
                f"scatter_rewards {at}",
                shape,
                4 * count + 8 * len(lengths),
                lambda a=at, x=on_gpu: scatter_op(*x, a),
                (lasting if at == "last" else spread).float(),
            )
    gpu.write(args.out, "rewards", floors, rows)


if __name__ == "__main__":
    main()
